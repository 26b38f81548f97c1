"""Models that choose rows by their content: where the instances are in them is another matter in every batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltasam.methods import ERM, PerInstanceSAM
from deltasam.per_instance.interception.pass_state import PassState
from deltasam.per_instance.verification import own_rows
from deltasam.speed.capture import Captured
from helpers.architectures import ARCHITECTURES, Architecture, make
from helpers.instance_reference import relative
from helpers.taped import play_graphs_on_the_cpu

Batch = dict[str, Tensor]
COUNTS = ([2, 2, 2, 2], [1, 4, 2, 1], [3, 1, 2, 2], [1, 1, 5, 5], [2, 2, 2, 2], [8, 2, 1, 1])


def masked(counts: Sequence[int]) -> Batch:
    """Texts of eight tokens of which some are to be predicted."""
    ids, labels = torch.randint(3, 31, (len(counts), 8)), torch.full((len(counts), 8), -100)
    for i, count in enumerate(counts):
        at = torch.randperm(8)[:count]
        labels[i, at] = ids[i, at]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def of_masked_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the masked tokens of every text, from logits of these tokens only."""
    at = labels != -100
    nll = F.cross_entropy(logits, labels[at], reduction="none")
    return torch.zeros(len(at), dtype=nll.dtype).index_add(0, at.nonzero()[:, 0], nll) / at.sum(1)


def hugging_face(model: nn.Module, batch: Batch) -> Tensor:
    return of_masked_tokens(model(**batch).logits, batch["labels"])


def modernbert() -> nn.Module:
    import transformers

    config = transformers.ModernBertConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, pad_token_id=1, global_attn_every_n_layers=2, local_attention=8,
        bos_token_id=2, eos_token_id=2, cls_token_id=2, sep_token_id=2, sparse_prediction=True,
    )  # fmt: skip
    return transformers.ModernBertForMaskedLM(config)


class Head(nn.Module):
    """A head on the masked tokens, behind an operation that is not the choice itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(31, 6), nn.Linear(6, 8), nn.Linear(8, 31)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.words(input_ids)))[labels != -100].relu())


def small(model: nn.Module, batch: Batch) -> Tensor:
    return of_masked_tokens(model(batch["input_ids"], batch["labels"]), batch["labels"])


class Sorts(nn.Module):
    """Sorts the batch by length, and undoes it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.out = nn.Embedding(31, 6), nn.Linear(6, 8), nn.Linear(8, 31)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        order = mask.sum(1).argsort(descending=True, stable=True)
        x = torch.tanh(self.inner(self.words(ids)[order])) * mask[order].unsqueeze(-1)
        return self.out(x.sum(1)[order.argsort()])


class SortsBehindAnOperation(Sorts):
    """As before, but the layers see the sorted rows only after an elementwise operation."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        order = mask.sum(1).argsort(descending=True, stable=True)
        x = torch.tanh(self.inner(self.words(ids)[order].exp())) * mask[order].unsqueeze(-1)
        x = x.sum(1)
        return self.out(torch.zeros_like(x).index_copy(0, order, x) + 1)


class Listwise(nn.Module):
    """Scores of passages, k N rows, of which each question has its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.out = nn.Embedding(31, 6), nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, passages: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(self.words(passages))).sum(1)).squeeze(1)


def listwise(model: nn.Module, batch: Batch) -> Tensor:
    """After the last layer the scores are divided among the questions."""
    at = batch["labels"] != -100
    passages = batch["input_ids"][at].unsqueeze(1)
    parts = model(passages).split(at.sum(1).tolist())
    return torch.stack([torch.logsumexp(part, 0) - part[0] for part in parts])


def sorted_inside(model: nn.Module, batch: Batch) -> Tensor:
    lengths = (batch["labels"] != -100).sum(1)
    mask = (torch.arange(8, device=lengths.device) < lengths.unsqueeze(1)).double()
    return F.cross_entropy(model(batch["input_ids"], mask), batch["input_ids"][:, 0], reduction="none")


def gradient(model: nn.Module, batch: Batch, objective: Callable[..., Tensor], **options: Any) -> tuple[Tensor, ...]:
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fall back to the loop
        step = PerInstanceSAM(rho=0.1, **options).backward(model, batch, objective)
    assert step.perturbed_losses is not None
    return step.perturbed_losses, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("build", "objective"),
    [(modernbert, hugging_face), (Head, small), (Sorts, sorted_inside), (SortsBehindAnOperation, sorted_inside),
     (Listwise, listwise)],
    ids=["ModernBERT", "head", "sorted", "sorted behind an operation", "after the last layer"],
)  # fmt: skip
@pytest.mark.parametrize("group", [1, 2])
def test_a_batch_with_other_rows_is_not_read_as_the_one_before(
    build: Callable[[], nn.Module], objective: Callable[..., Tensor], group: int
) -> None:
    """All batches have a multiple of N chosen rows, and the first one has equally many of each instance."""
    model = build().double().eval()
    for counts in COUNTS:
        batch = masked(counts)
        mine = gradient(model, batch, objective, group=group)
        exact = gradient(model, batch, objective, group=group, engine="loop")
        assert relative(mine[0], exact[0]) < 1e-9
        assert relative(mine[1], exact[1]) < 1e-9


@pytest.mark.parametrize("build", [Sorts, SortsBehindAnOperation])
def test_a_compiled_model_that_sorts_runs_uncompiled(build: Callable[[], nn.Module]) -> None:
    """Its graph has the same shapes for every order, and would be compared only once."""
    model = build().double()
    fast = torch.compile(model, backend="aot_eager")
    with pytest.warns(UserWarning, match="run uncompiled.*chooses rows by their content"):
        PerInstanceSAM().backward(fast, masked(COUNTS[0]), sorted_inside)
    for counts in COUNTS:
        batch = masked(counts)
        mine, exact = gradient(fast, batch, sorted_inside), gradient(model, batch, sorted_inside, engine="loop")
        assert relative(mine[0], exact[0]) < 1e-9
        assert relative(mine[1], exact[1]) < 1e-9


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A simulated graph on the CPU, or a real one."""
    if request.param == "cpu":
        play_graphs_on_the_cpu(monkeypatch)
    return str(request.param)


def on(device: str, batch: Batch) -> Batch:
    return {name: value.to(device) for name, value in batch.items()}


def captured_gradient(captured: Captured, model: nn.Module, batch: Batch) -> tuple[Tensor, bool]:
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fall back to the loop
        step = captured.backward(model, batch, sorted_inside)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), bool(step.skipped)


@pytest.mark.parametrize("build", [Sorts, SortsBehindAnOperation])
@pytest.mark.parametrize("group", [1, 2])
def test_a_replay_that_reorders_the_batch_leaves_out_its_perturbation(
    build: Callable[[], nn.Module], device: str, group: int
) -> None:
    """It was recorded with a batch in order; a replay can neither loop nor raise."""
    model = build().double().to(device)
    captured = Captured(PerInstanceSAM(rho=0.1, group=group))
    for counts in ([2, 2, 2, 2], [1, 1, 1, 1], [1, 4, 2, 3], [5, 3, 2, 1], [3, 3, 3, 3], [1, 2, 3, 4]):
        batch = on(device, masked(counts))
        mine, skipped = captured_gradient(captured, model, batch)
        is_sorted = counts == sorted(counts, reverse=True)
        method = PerInstanceSAM(rho=0.1, group=group, engine="loop") if is_sorted else ERM()
        model.zero_grad()
        method.backward(model, batch, sorted_inside)
        expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert relative(mine, expected) < 1e-9
        assert skipped != is_sorted
    assert captured.report.replayed == 5  # the first replay follows the recording
    assert captured.skipped == 2


def test_a_model_that_has_reordered_a_batch_is_captured_as_a_loop(device: str) -> None:
    model = Sorts().double().to(device)
    captured = Captured(PerInstanceSAM(rho=0.1))
    for counts in ([1, 4, 2, 3], [2, 2, 2, 2], [1, 2, 3, 4], [5, 3, 2, 1]):
        batch = on(device, masked(counts))
        mine, skipped = captured_gradient(captured, model, batch)
        assert relative(mine, gradient(model, batch, sorted_inside, engine="loop")[1]) < 1e-9
        assert not skipped
    assert captured.report.replayed == 3


def test_equal_counts_stay_in_low_rank() -> None:
    """Rows that are chosen, and still next to each other: the test in every step lets them pass."""
    model = Head().double()
    for _ in range(3):
        assert PerInstanceSAM().backward(model, masked([2, 2, 2, 2]), small).forwards == 2


def test_the_last_token_of_a_text_stays_in_low_rank() -> None:
    """The usual pooling of a causal model: one row of each instance, in their order."""

    class Last(Sorts):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            found = torch.tanh(self.inner(self.words(ids)))
            return self.out(found[torch.arange(len(ids)), mask.sum(1).long() - 1])

    model = Last().double()
    for counts in COUNTS:
        batch = masked(counts)
        step = PerInstanceSAM(rho=0.1).backward(model, batch, sorted_inside)
        assert step.forwards == 2
        mine, exact = (gradient(model, batch, sorted_inside, engine=engine) for engine in ("low-rank", "loop"))
        assert relative(mine[1], exact[1]) < 1e-9


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_pooling_of_a_classifier_is_not_tested_in_every_step(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes the last token's logits after the head; a test would wait for the device."""
    import transformers

    monkeypatch.setattr("deltasam.per_instance.recording.crossed_rows", lambda state: pytest.fail("tested"))
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, num_labels=3,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no loop, and the compiled model runs compiled
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        step = PerInstanceSAM().backward(called, masked([2, 2, 2, 2]), classified)
    assert step.forwards == 2


def classified(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return F.cross_entropy(model(**inputs).logits, batch["input_ids"][:, 0] % 3, reduction="none")


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_ordinary_models_are_not_tested_in_every_step(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows follow from shapes, so a step has no further backward passes."""
    seen: list[PassState] = []
    for name in ("mixed_rows", "crossed_rows"):
        test = getattr(own_rows, name)
        monkeypatch.setattr(
            f"deltasam.per_instance.recording.{name}", lambda *args, test=test: seen.append(args[0]) or test(*args)
        )
    model, _, batch = make(architecture, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PerInstanceSAM().backward(model, batch, architecture.losses)
    assert not seen
