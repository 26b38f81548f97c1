"""Memory runs out and the batch is split: the gradient stays that of the batch, and unsupported cases raise."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import ERM, SAM, Contrastive, FreeLB, MicroBatches
from deltasam.integrations import MethodTrainer
from deltasam.methods import ESAM, TAT, TAVAT, PerInstanceSAM, SubsetSAM
from deltasam.speed.splitting import Splitting
from helpers.problems import CNN, TRANSFORMER, TRANSFORMER_NO_DROPOUT, cross_entropy, grads, relative_error
from helpers.promises import snapshot
from helpers.rows import ROWS, Row
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, largest_difference, weights

SIZE = 7
DIVISIBLE = [row for row in ROWS if row.name not in ("esam", "subset-sam")]


class Hungry:
    """An objective with memory for so many instances, and only from so many calls on for all of them."""

    def __init__(self, most: int, calls: int = 0, objective: Any = cross_entropy) -> None:
        self.most, self.calls, self.objective, self.met = most, calls, objective, [0]

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        size = len(batch[0] if isinstance(batch, tuple) else batch["labels"])
        self.calls -= 1
        if self.calls < 0 and size > self.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} GiB")
        self.met.append(size)
        return self.objective(model, batch)


@pytest.mark.parametrize("row", DIVISIBLE, ids=str)
@pytest.mark.parametrize("calls", [0, 1])  # in the first pass, or in the second
def test_gradient_of_the_whole_batch(row: Row, calls: int) -> None:
    model, batch, _ = TRANSFORMER_NO_DROPOUT.make(size=SIZE)
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # of an earlier micro-batch
    before, kept = snapshot(model), [p.grad for p in model.parameters()]
    method = Splitting(row.method())
    step = method.backward(model, batch, row.wrap(Hungry(2, calls)))
    other, _, _ = TRANSFORMER_NO_DROPOUT.make(size=SIZE)
    for p in other.parameters():
        p.grad = torch.ones_like(p)
    whole = row.method().backward(other, batch, row.wrap(Hungry(SIZE)))
    # The second differences of the default radius amplify rounding.
    tolerance = 1e-6 if row.name.startswith("delta-sam") else 1e-10
    found, wanted = ({name: grad - 1 for name, grad in grads(one).items()} for one in (model, other))
    assert relative_error(found, wanted) < tolerance
    assert torch.allclose(step.losses, whole.losses, rtol=1e-12)
    assert all(p.grad is earlier for p, earlier in zip(model.parameters(), kept, strict=True))
    after = snapshot(model)
    assert all(torch.equal(before["weights"][name], after["weights"][name]) for name in before["weights"])
    one_pass = row.passes == (1, 1) and calls == 1
    assert method.largest in ((None,) if one_pass else (1, 2))  # 7 -> 3 -> 1; of groups of two: 7 -> 2
    assert method.steps == 1


@pytest.mark.parametrize("kind", [FreeLB, TAVAT, TAT], ids=lambda kind: kind.__name__)
def test_adversaries_on_embeddings(kind: Any) -> None:
    options: dict[str, Any] = {"embeddings": "embeddings", "init_magnitude": 0.0}
    found = []
    for make in (lambda: Splitting(kind(**options)), lambda: kind(**options)):
        model, batch, _ = TRANSFORMER_NO_DROPOUT.make(size=SIZE)
        objective = cross_entropy if found else Hungry(4)
        make().backward(model, batch, objective)
        found.append(grads(model))
    assert relative_error(*found) < 1e-10


def test_the_size_is_kept_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model, batch, _ = TRANSFORMER.make(size=8)
    method, hungry = Splitting(SAM()), Hungry(2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            method.backward(model, batch, hungry)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "memory ran out in a step over parts of 8 instances",
        "memory ran out in a step over parts of 4 instances",
    ]
    assert method.largest == 2
    assert set(hungry.met[1:]) == {2}
    assert len(hungry.met[1:]) == 3 * 2 * 4
    method.backward(model, (batch[0][:2], batch[1][:2]), hungry)  # fits without splitting
    assert hungry.met[-2:] == [2, 2]


def test_where_memory_suffices_nothing_changes() -> None:
    found = []
    for make in (lambda: Splitting(SAM()), SAM):
        model, batch, objective = TRANSFORMER.make(size=SIZE)
        torch.manual_seed(4)
        for given in (batch, batch, MicroBatches([batch, batch])):
            if isinstance(given, MicroBatches):  # earlier gradients change the order of additions
                model.zero_grad()
            make().backward(model, given, objective)
            found.append({**grads(model), "stream": torch.get_rng_state()})
    for one, two in zip(found[:3], found[3:], strict=True):
        assert_same_bits(one, two)


def test_random_streams_and_buffers_start_over() -> None:
    """The parts draw what they would have drawn had they been split from the start."""
    found = []
    for start in (None, 3):
        model, batch, _ = TRANSFORMER.make(size=6)
        model.register_buffer("met", torch.zeros(()))

        def objective(model: Any, batch: Any) -> Tensor:
            model.met += 1
            losses = cross_entropy(model, batch)
            if len(losses) > 3:
                raise torch.OutOfMemoryError("after the pass")
            return losses

        torch.manual_seed(4)
        Splitting(SAM(), largest=start).backward(model, batch, objective)
        found.append({**grads(model), "met": model.met, "stream": torch.get_rng_state()})
    assert_same_bits(*found)


@pytest.mark.parametrize(
    ("method", "objective", "message"),
    [
        (SAM(), Contrastive(), r"Contrastive, which compares the instances.*Use 'stop' and a smaller batch"),
        (SubsetSAM(), cross_entropy, r"SubsetSAM, which picks instances"),
        (ESAM(), cross_entropy, r"ESAM, which picks instances"),
    ],
    ids=["in-batch", "subset", "esam"],
)
def test_refusals(method: Any, objective: Any, message: str) -> None:
    model, batch, _ = TRANSFORMER.make()
    with pytest.raises(ValueError, match=message):
        Splitting(method).backward(model, batch, objective)
    assert all(p.grad is None for p in model.parameters())


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    method = Splitting(SAM())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    model, batch, objective = TRANSFORMER.make()
    with pytest.raises(ValueError, match=r"in one process.* 4.*MicroBatches"):
        method.backward(model, batch, objective)


def hopeless(model: nn.Module, batch: Any) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_what_cannot_be_split() -> None:
    model, batch, _ = CNN.make()
    with pytest.raises(torch.OutOfMemoryError, match=r"bn \(BatchNorm2d\) uses statistics"):
        Splitting(SAM()).backward(model, batch, hopeless)
    model, batch, _ = TRANSFORMER.make()
    with pytest.raises(torch.OutOfMemoryError, match=r"parts of 1 instances cannot be made smaller"):
        Splitting(SAM()).backward(model, batch, hopeless)
    numbers = {"ids": [1, 2, 3], "x": torch.zeros(3, 2)}
    with pytest.raises(torch.OutOfMemoryError, match=r"tensors with one row per instance"):
        Splitting(SAM()).backward(model, numbers, hopeless)
    with pytest.raises(torch.OutOfMemoryError, match=r"ran out of memory in pass 1.*\n.*on_out_of_memory='split'"):
        Splitting(PerInstanceSAM(group=4)).backward(model, batch, hopeless)
    assert all(p.grad is None for p in model.parameters())


REAL = """
import resource, torch
from deltasam import SAM, MicroBatches
from deltasam.speed.splitting import Splitting
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 2048), nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.Linear(2048, 1)).double()
x = torch.randn(16384, 8).double()
objective = lambda model, x: model(x).squeeze(-1) ** 2
SAM().backward(model, MicroBatches(x.split(256)), objective)
wanted = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 300 * 2**20, resource.RLIM_INFINITY))
method = Splitting(SAM())
method.backward(model, x, objective)
assert method.largest < 16384, "memory did not run out"
assert all(float((p.grad - w).norm() / w.norm()) < 1e-10 for p, w in zip(model.parameters(), wanted))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits the address space as Linux does")
def test_memory_that_really_runs_out() -> None:
    result = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "memory ran out in a step over parts of 16384 instances" in result.stderr


def trained(folder: Path, objective: Any = None, **options: Any) -> MethodTrainer:
    model = fresh("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).double()
    trainer = MethodTrainer(
        model=model, args=arguments(folder, max_steps=4, save_strategy="steps", save_steps=2), method=SAM(rho=0.05),
        train_dataset=classification_data(), objective=objective, **options,
    )  # fmt: skip
    trainer.train()
    return trainer


def test_in_the_trainer(tmp_path: Path) -> None:
    from deltasam import Classification

    whole = trained(tmp_path / "whole")
    hungry = Hungry(1, calls=3, objective=Classification())
    split = trained(tmp_path / "split", hungry, on_out_of_memory="split")
    assert largest_difference(weights(whole.model), weights(split.model)) < 1e-10
    assert split.splitting.largest == 1
    resumed = MethodTrainer(
        model=fresh("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).double(),
        args=arguments(tmp_path / "split", max_steps=4), method=SAM(rho=0.05), train_dataset=classification_data(),
        on_out_of_memory="split",
    )  # fmt: skip
    resumed.train(resume_from_checkpoint=str(tmp_path / "split/checkpoint-2"))
    assert resumed.splitting.largest == 1
    assert_same_bits(weights(resumed.model), weights(split.model))


def test_the_trainer_refuses(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    for options, message in (
        ({"on_out_of_memory": "retry"}, r"on_out_of_memory='retry' must be 'stop' or 'split'"),
        ({"on_out_of_memory": "split", "capture": True}, r"capture=True and on_out_of_memory='split'"),
        ({"on_out_of_memory": "split", "objective": Contrastive()}, r"compares the instances"),
    ):
        with pytest.raises(ValueError, match=message):
            MethodTrainer(model=fresh(), args=args, method=ERM(), train_dataset=classification_data(), **options)


@pytest.mark.parametrize("largest", [0, -1, 1.5, True])
def test_an_invalid_size_of_parts(largest: float) -> None:
    with pytest.raises(ValueError, match=f"largest={largest}"):
        Splitting(SAM(), largest=largest)
