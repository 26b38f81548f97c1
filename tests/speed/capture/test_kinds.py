"""Captured methods with several kinds of steps, or with choices in every step: LookSAM, ESAM and FisherSAM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import LossBudget, MicroBatches, Relative, Scheduled
from deltasam.methods import ESAM, SAM, FisherSAM, LookSAM, Method
from deltasam.speed.capture import Captured
from deltasam.speed.capture._graph import RecordedStep
from helpers.problems import TRANSFORMER, grads, relative_error
from helpers.taped import play_graphs_on_the_cpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A simulated graph on the CPU, or a real one."""
    if request.param == "cpu":
        play_graphs_on_the_cpu(monkeypatch)
    return str(request.param)


def train(
    taken: Any,
    device: str,
    steps: int,
    *,
    spoilt: int | None = None,
    split: bool = False,
    reload: int | None = None,
    first: int = 0,
) -> list[dict[str, Tensor]]:
    """Gradients of steps with dropout and other data and weights every time; one may have an infinite loss."""
    model, (ids, labels), plain = TRANSFORMER.make()
    model, found = model.to(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        losses: Tensor = plain(model, batch[:2]) * batch[2]
        return losses

    torch.manual_seed(3)
    for number in range(steps):
        optimizer.zero_grad()
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(first + number))
        factor = torch.full((len(ids),), float("inf") if number == spoilt else 1.0, dtype=torch.float64)
        batch = tuple(leaf[order].to(device) for leaf in (ids, labels, factor))
        parts = MicroBatches([tuple(leaf[:2] for leaf in batch), tuple(leaf[2:] for leaf in batch)])
        taken.backward(model, parts if split else batch, objective)
        found.append(grads(model))
        if number != spoilt:
            optimizer.step()
        if number == reload:
            taken.load_state_dict(taken.state_dict())
    return found


def check(make: Callable[[], Method], device: str, steps: int, **options: Any) -> Captured:
    captured, method = Captured(make()), make()
    found, wanted = train(captured, device, steps, **options), train(method, device, steps, **options)
    assert captured.report.obstacles == {}
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if number != options.get("spoilt"):
            assert relative_error(one, other) < 1e-9, number
    assert captured.steps == method.steps
    return captured


METHODS: dict[str, Callable[..., Method]] = {
    "look-sam": partial(LookSAM, rho=0.3, k=2),
    "look-sam-always": partial(LookSAM, rho=0.3, k=1),
    "fisher-sam": partial(FisherSAM, rho=0.3, refresh=3),
    "fisher-sam-always": partial(FisherSAM, rho=0.3, refresh=1),
    "esam": partial(ESAM, rho=0.3),
    "esam-all-instances": partial(ESAM, rho=0.3, gamma=1.0),
    "esam-all-tensors": partial(ESAM, rho=0.3, beta=1.0),
}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        (name, split)
        for name, make in METHODS.items()
        for split in (False, True)
        if not split or make().supports_micro_batches()
    ],
)
def test_captured_equals_ordinary(name: str, split: bool, device: str) -> None:
    captured = check(METHODS[name], device, 9, split=split)
    assert captured.report.replayed >= 4


def test_the_kinds_of_look_sam_are_two_graphs(device: str) -> None:
    captured = check(partial(LookSAM, rho=0.3, k=3), device, 13)
    # SAM in the steps 0 (allocates), 3 (observed), 6, 9, 12; the others are reused, 1 observed.
    assert (captured.report.ordinary, captured.report.recorded, captured.report.replayed) == (3, 2, 10)


def test_a_schedule_of_rho_records_nothing_again(device: str) -> None:
    rule = Scheduled(0.3, warmup=30, unit="steps")
    for name in ("look-sam", "fisher-sam", "esam"):
        captured = check(partial(METHODS[name], rho=rule), device, 9)
        assert captured.report.recorded == (1 if name == "esam" else 2), name


def test_numbers_of_rho_may_change(device: str) -> None:
    for name in ("look-sam", "fisher-sam", "esam"):
        captured, method = Captured(METHODS[name]()), METHODS[name]()
        model, (ids, labels), objective = TRANSFORMER.make()
        model, batch = model.to(device), (ids.to(device), labels.to(device))
        for number in range(8):
            found, rho = [], 0.1 + 0.05 * number
            captured.method, method = captured.method.replace(rho=rho), method.replace(rho=rho)
            for taken in (captured, method):
                torch.manual_seed(number)
                model.zero_grad()
                taken.backward(model, batch, objective)
                found.append(grads(model))
            assert relative_error(*found) < 1e-9, (name, number)
        assert captured.report.recorded == (1 if name == "esam" else 2), name
        assert captured.report.obstacles == {}


@pytest.mark.parametrize("spoilt", [8, 9])  # replayed steps; of both kinds
@pytest.mark.parametrize("make", [METHODS["look-sam"], METHODS["fisher-sam"]], ids=["look-sam", "fisher-sam"])
def test_a_step_that_is_not_finite(make: Callable[[], Method], spoilt: int, device: str) -> None:
    """FisherSAM computes its mask again in the next step, LookSAM reuses nothing."""
    check(make, device, 12, spoilt=spoilt)


@pytest.mark.parametrize("make", [METHODS["look-sam"], METHODS["fisher-sam"]], ids=["look-sam", "fisher-sam"])
def test_a_loaded_state_is_recorded_anew(make: Callable[[], Method], device: str) -> None:
    check(make, device, 12, reload=6)


def test_esam_with_a_radius_in_units_of_the_loss(device: str) -> None:
    captured = check(lambda: ESAM(rho=LossBudget(0.1, at_most=0.5)), device, 5)
    assert captured.report.replayed == 4


def test_esam_with_a_radius_relative_to_the_perturbed_tensors(device: str) -> None:
    captured = Captured(ESAM(rho=Relative(0.1)))
    with pytest.warns(UserWarning, match=r"not captured.*depends on which tensors are perturbed"):
        train(captured, device, 3)
    assert captured.report.ordinary == 3


READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select", "unique")


@pytest.mark.parametrize("name", [*METHODS, "sam"])
def test_the_same_operations_whatever_the_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings of two trainings run the same operations on the same shapes, and read nothing on the host."""
    play_graphs_on_the_cpu(monkeypatch)
    make = METHODS.get(name, SAM)
    for split in (False, True) if make().supports_micro_batches() else (False,):
        tapes = []
        for first in (0, 50):
            captured = Captured(make())
            train(captured, "cpu", 9, split=split, first=first)
            tapes.append([e._graph.operations for e in captured._seen.values() if isinstance(e, RecordedStep)])
        assert tapes[0] == tapes[1]
        assert tapes[0]
        names = {operation.split(".")[0] for tape in tapes[0] for operation, _ in tape}
        assert "mm" in names or "addmm" in names
        assert not names & set(READS)
