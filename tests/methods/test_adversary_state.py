"""The state of TAT and TAVAT changes in place, table by table, because a captured step keeps its memory addresses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import TAT, TAVAT, Classification
from deltasam.methods import _buffers
from deltasam.speed.capture import Captured, _captured
from deltasam.speed.capture._streams import Needs

LABELS = torch.tensor([0, 1, 2, 0])
TABLES = {TAT: "confusion", TAVAT: "vocabulary"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3)).double()


def batch(seed: int) -> Any:
    return torch.randint(9, (4, 2), generator=torch.Generator().manual_seed(seed)), LABELS


@pytest.mark.parametrize("kind", TABLES)
def test_the_table_keeps_its_memory(kind: type) -> None:
    method, model, name = kind(embeddings="0", adv_lr=0.3), network(), TABLES[kind]
    method.backward(model, batch(0), Classification())
    table, before = method.state[name], method.state[name].clone()
    key = method.buffer_key()
    method.backward(model, batch(1), Classification())
    assert method.state[name] is table
    assert not torch.equal(table, before)
    assert method.buffer_key() == key
    method.load_state_dict(method.state_dict())
    assert method.buffer_key() != key  # other memory: old recordings are invalid


def test_the_counts_are_those_of_a_sum() -> None:
    model, wanted = network(), torch.zeros(3, 3)
    method = TAT(embeddings="0", adv_steps=2, decay=0.5, init_magnitude=0.0)
    for seed in range(4):
        ids, labels = batch(seed)
        wanted = wanted * 0.5
        for label, predicted in zip(labels.tolist(), model(ids).argmax(-1).tolist(), strict=True):
            wanted[label, predicted] += label != predicted
        method.backward(model, (ids, labels), Classification())
    torch.testing.assert_close(method.state["confusion"], wanted)


@pytest.mark.parametrize("kind", TABLES)
def test_checkpoints_share_no_memory(kind: type) -> None:
    method, model, name = kind(embeddings="0", adv_lr=0.3), network(), TABLES[kind]
    method.backward(model, batch(0), Classification())
    saved = method.state_dict()
    before = saved[name].clone()
    other = kind(embeddings="0", adv_lr=0.3)
    other.load_state_dict(saved)
    for one in (method, other):
        one.backward(model, batch(1), Classification())
    assert torch.equal(saved[name], before)
    assert torch.equal(method.state[name], other.state[name])


class Played:
    """A fake graph: it reads and writes the memory that it was recorded with."""

    def __init__(self, run: Any, model: nn.Module, inputs: Any, needs: Needs, pool: Any, place: Any) -> None:
        self.run, self.model, self.place, self.placed = run, model, place, list(place)
        self.method = Played.of
        self.tables = {name: t for name, t in self.method.state.items() if isinstance(t, Tensor) and t.ndim == 2}

    def replay(self, inputs: Any, steps: int) -> Any:
        now = {name: self.method.state[name] for name in self.tables}
        self.method.state.update(self.tables)
        kept = {name: p.grad for name, p in self.model.named_parameters()}
        self.model.zero_grad()
        step = self.run(inputs)
        for name, p in self.model.named_parameters():
            self.place[name].copy_(p.grad)
            p.grad = kept[name]
        assert all(self.method.state[name] is table for name, table in self.tables.items())
        self.method.state.update(now)
        return step


@pytest.mark.parametrize("kind", TABLES)
def test_replays_accumulate(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_captured, "RecordedStep", Played)
    monkeypatch.setattr(_captured, "Pool", SimpleNamespace)
    monkeypatch.setattr(_captured, "HAS_GRAPHS", ("cpu",))
    found = []
    for wrap in (lambda m: m, Captured):
        method, model = kind(embeddings="0", adv_lr=0.3), network()
        monkeypatch.setattr(Played, "of", method, raising=False)
        taken, optimizer, objective = wrap(method), torch.optim.SGD(model.parameters(), lr=0.5), Classification()
        for seed in range(8):
            if seed == 4:  # a checkpoint in between
                taken.load_state_dict(taken.state_dict())
            taken.backward(model, batch(seed), objective)
            optimizer.step()
            optimizer.zero_grad()
        found.append((method.state[TABLES[kind]], model[2].weight))
    assert taken.report.replayed == 5  # except the first, the first with a table, the first after the checkpoint
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", TABLES)
def test_no_table_is_made_while_a_step_is_recorded(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buffers, "is_recorded", lambda device: True)
    with pytest.raises(RuntimeError, match="does not exist yet"):
        kind(embeddings="0").backward(network(), batch(0), Classification())


class TwoTables(nn.Module):
    def __init__(self, first: int, second: int, tied: bool = False) -> None:
        super().__init__()
        self.a = nn.Embedding(first, 4)
        self.b = nn.Embedding(second, 4)
        if tied:
            self.b.weight = self.a.weight
        self.out = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out((self.a(ids[:, :2]) + self.b(ids[:, 2:])).mean(1))


def is_embedding(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)


@pytest.mark.parametrize("rows", [(9, 5), (5, 9), (7, 7)])
def test_every_table_has_one_vocabulary(rows: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = TwoTables(*rows)
    ids = torch.cat([torch.randint(r, (4, 2)) for r in rows], 1)
    ids[0] = torch.tensor([rows[0] - 1, 0, rows[1] - 1, 0])
    method = TAVAT(embeddings=is_embedding, adv_lr=0.3)
    method.backward(model, (ids, LABELS), Classification())
    tables = [method.state[name] for name in ("vocabulary", "vocabulary.1")]
    assert [table.shape for table in tables] == [(r, 4) for r in rows]
    fresh = TAVAT(embeddings=is_embedding, adv_lr=0.3)
    fresh.backward(model, (ids, LABELS), Classification())
    starts = TAVAT(embeddings=is_embedding, adv_lr=0.0)  # without ascent the vocabulary keeps its initial values
    starts.backward(model, (ids, LABELS), Classification())
    for name, table, used in zip(("vocabulary", "vocabulary.1"), tables, (ids[:, :2], ids[:, 2:]), strict=True):
        unused = torch.ones(len(table), dtype=torch.bool).index_fill(0, used.flatten(), False)
        assert not torch.equal(table[used], starts.state[name][used])
        assert torch.equal(table[unused], starts.state[name][unused])
        assert torch.equal(table, fresh.state[name])
    assert not torch.equal(starts.state["vocabulary"][:5], starts.state["vocabulary.1"][:5])
    assert not method.replace(adv_steps=1, init_magnitude=0.0).is_erm()


def test_layers_on_one_table_share_a_vocabulary() -> None:
    torch.manual_seed(0)
    method = TAVAT(embeddings=is_embedding, adv_lr=0.3)
    method.backward(TwoTables(7, 7, tied=True), (torch.randint(7, (4, 4)), LABELS), Classification())
    assert [name for name in method.state if name.startswith("vocabulary")] == ["vocabulary"]
