"""Captured steps over micro-batches equal ordinary ones, dropout and shares of the parts included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import MicroBatches
from deltasam.methods import ERM, SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.objectives import Classification
from deltasam.objectives.regularisers import R3F, VAT
from deltasam.speed.capture import Captured
from deltasam.weighting import FiniteDifference
from helpers.captured_models import CAPTURABLE
from helpers.problems import TRANSFORMER, TRANSFORMER_NO_DROPOUT, Problem, cross_entropy, grads, relative_error
from helpers.rows import Row
from helpers.taped import play_graphs_on_the_cpu

ROWS = [row for row in CAPTURABLE if row.method().supports_micro_batches()]
TOLERANCE = 1e-9  # float64; steps at other weights and with other masks differ by 1e-2


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A simulated graph on the CPU, or a real one."""
    if request.param == "cpu":
        play_graphs_on_the_cpu(monkeypatch)
    return str(request.param)


def parts(batch: Any, number: int, device: str, sizes: tuple[int, ...] = (2, 1, 2)) -> MicroBatches:
    """The instances of a batch in another order, in parts."""
    order = torch.randperm(len(batch[0]), generator=torch.Generator().manual_seed(number))
    split = [leaf[order].to(device).split(sizes) for leaf in batch]
    return MicroBatches(zip(*split, strict=True))


def train(
    taken: Any, device: str, problem: Problem, wrap: Callable[[Any], Any] = lambda objective: objective, steps: int = 5
) -> list[dict[str, Tensor]]:
    model, batch, objective = problem.make()
    model, found, wrapped = model.to(device), [], wrap(objective)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(3)
    for number in range(steps):
        optimizer.zero_grad()
        taken.backward(model, parts(batch, number, device), wrapped)
        found.append(grads(model))
        optimizer.step()
    return found


def check(
    method: Callable[[], Method], device: str, problem: Problem, wrap: Any = lambda objective: objective
) -> None:
    captured = Captured(method())
    found, wanted = train(captured, device, problem, wrap), train(method(), device, problem, wrap)
    assert captured.report.obstacles == {}
    assert captured.report.replayed >= 2
    assert max(map(relative_error, found, wanted)) < TOLERANCE


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_captured_equals_ordinary(row: Row, device: str) -> None:
    def method() -> Method:
        made = row.method()
        weighting = getattr(made, "weighting", None)
        if isinstance(weighting, FiniteDifference):  # above rounding
            made = made.replace(weighting=FiniteDifference(radius=0.5, samples=weighting.samples))
        return made

    check(method, device, TRANSFORMER, row.wrap)


@pytest.mark.parametrize("regulariser", [R3F, VAT])
def test_every_part_of_a_regulariser_repeats_its_own_masks(regulariser: Any, device: str) -> None:
    """Its passes with perturbed embeddings start in the middle of the pass over all parts."""
    check(SAM, device, TRANSFORMER, lambda _: regulariser(Classification(), masks="shared", embeddings="embeddings"))


def test_the_whole_step(device: str) -> None:
    results = []
    for whole in (True, False):
        model, batch, objective = TRANSFORMER.make()
        model = model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1, device=device), fused=True)
        captured = Captured(SAM(rho=0.1), optimizer=optimizer)
        torch.manual_seed(3)
        for number in range(5):
            if whole:
                captured.step(model, parts(batch, number, device), objective)
            else:
                SAM(rho=0.1).backward(model, parts(batch, number, device), objective)
                optimizer.step()
                optimizer.zero_grad()
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert relative_error(*results) < TOLERANCE


def test_other_sizes_of_the_parts_are_another_graph(device: str) -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    captured, model = Captured(SAM()), model.to(device)
    for sizes in ((2, 3), (3, 2), (2, 1, 2), (5,), (2, 3)):
        captured.backward(model, parts(batch, 0, device, sizes), objective)
    assert len(captured._seen) == 4
    assert captured.report.recorded == 1


@dataclass(frozen=True)
class Weighted:
    """Counts what a batch weighs; its losses are those of a mean over the whole batch."""

    count: Callable[[Any], Any]

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch[:2])

    def items(self, batch: Any) -> Any:
        return self.count(batch)


COUNTS: dict[str, Callable[[Any], Any]] = {
    "a tensor": lambda batch: batch[1].sum() + 1,
    "numbers read from the device": lambda batch: int(batch[1].sum()) + 1,
    "numbers of the host": lambda batch: float(batch[2].sum()),
}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("method", [ERM, SAM, DeltaSAM, PerInstanceSAM])
def test_shares_are_those_of_every_step(method: type[Method], count: Callable[[Any], Any], device: str) -> None:
    def run(taken: Any) -> list[dict[str, Tensor]]:
        model, batch, _ = TRANSFORMER_NO_DROPOUT.make()
        model, found, objective = model.to(device), [], Weighted(count)
        for number in range(6):
            model.zero_grad()
            weights = torch.rand(3, generator=torch.Generator().manual_seed(number)).double()
            made = [(*part, weights[k : k + 1]) for k, part in enumerate(parts(batch, number, device))]
            taken.backward(model, MicroBatches(made), objective)
            found.append(grads(model))
        return found

    captured = Captured(method())
    found, wanted = run(captured), run(method())
    assert captured.report.obstacles == {}
    assert (captured.report.recorded, captured.report.replayed) == (1, 5)
    assert max(map(relative_error, found, wanted)) < (1e-4 if method is DeltaSAM else TOLERANCE)


def test_numbers_for_parts_of_a_part_are_refused(device: str) -> None:
    """A replay could not count them anew."""
    model, batch, _ = TRANSFORMER_NO_DROPOUT.make()
    captured, model = Captured(PerInstanceSAM(at_once=1)), model.to(device)
    objective = Weighted(lambda batch: len(batch[0]) + 1)
    captured.backward(model, parts(batch, 0, device), objective)
    with pytest.warns(UserWarning, match=r"not captured.*items returned the number.*return a tensor"):
        captured.backward(model, parts(batch, 1, device), objective)


def test_numbers_that_differ_from_step_to_step_are_mentioned_once(device: str) -> None:
    model, x = nn.Linear(3, 1).to(device), torch.ones(4, 3, device=device)
    captured = Captured(SAM(), max_graphs=2)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).squeeze(-1).square() * batch["factor"]

    def run() -> None:
        for number in range(8):
            captured.backward(model, {"x": x, "factor": float(number + 1)}, objective)

    with pytest.warns(
        UserWarning, match=r"evicted before they are replayed.*max_graphs=2.*make them tensors"
    ) as warned:
        run()
    assert len(warned) == 1
