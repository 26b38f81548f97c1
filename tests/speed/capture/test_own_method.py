"""Captured methods of a user: recorded if that is safe, otherwise ordinary steps and a warning."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import (
    SAM,
    TAT,
    TAVAT,
    DeltaSAM,
    FreeLB,
    FriendlySAM,
    Method,
    MomentumSAM,
    Step,
    make_step,
)  # fmt: skip
from deltasam.speed.capture import Captured
from deltasam.step.passes import Passes
from helpers.captured_models import CASES
from helpers.problems import grads, relative_error
from helpers.taped import play_graphs_on_the_cpu

pytestmark = pytest.mark.usefixtures("graphs")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)


@dataclass(frozen=True, kw_only=True)
class Own(Method):
    """An ascent along :meth:`direction` of the gradient."""

    rho: float = 0.3

    def _step(self, passes: Passes) -> Step:
        losses, gradient = passes.gradient()
        named = {n: g for n, g in zip(passes.params, gradient, strict=True) if g is not None}
        with passes.ascend(list(self.direction(named).values()), self.rho) as ascent:
            perturbed = passes.accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)

    def direction(self, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        return gradient


class Averaging(Own):
    """Keeps an average in new tensors: a graph would always read those that existed when it was recorded."""

    def direction(self, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        last = self.state.get("average", gradient)
        self.state["average"] = {n: 0.5 * last[n] + 0.5 * g for n, g in gradient.items()}
        return dict(self.state["average"])


class InPlace(Own):
    """Keeps an average in the same tensors, and declares that it can be captured."""

    capturable = True

    def direction(self, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, g in gradient.items():
            if name not in self.state:
                self.state[name] = g.clone()
            self.state[name].mul_(0.5).add_(0.5 * g)
        return {name: self.state[name].clone() for name in gradient}


class Alternating(Own):
    """Descends in every other step."""

    def direction(self, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        return gradient if self.steps % 2 == 0 else {name: -g for name, g in gradient.items()}


class WithPhases(Alternating):
    """Declares that there are two kinds of steps."""

    def capture_key(self) -> Hashable:
        return self.steps % 2


class MySAM(SAM):
    """Inherits everything."""


class MyDeltaSAM(DeltaSAM):
    """Inherits everything, kinds of steps too."""


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1).square()


def train(taken: Any, steps: int = 7) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(steps):
        optimizer.zero_grad()
        taken.backward(model, torch.randn(4, 4, generator=torch.Generator().manual_seed(number)), objective)
        found.append(grads(model))
        optimizer.step()
    return found


def compare(captured: Captured, method: Method) -> None:
    for number, (found, wanted) in enumerate(zip(train(captured), train(method), strict=True)):
        assert relative_error(found, wanted) < 1e-5, number
    assert captured.steps == method.steps


@pytest.mark.parametrize("kind", [Own, InPlace, MySAM])
def test_recorded(kind: type[Method]) -> None:
    captured = Captured(kind())
    compare(captured, kind())
    assert (captured.report.recorded, captured.report.replayed, captured.report.obstacles) == (1, 6, {})


@pytest.mark.parametrize("kind", [WithPhases, MyDeltaSAM])
def test_each_phase_is_recorded(kind: type[Method]) -> None:
    changes: dict[str, Any] = {"probe_every": 2} if kind is MyDeltaSAM else {}
    captured = Captured(kind(**changes))
    if kind is MyDeltaSAM:  # its weights are rounding noise here
        train(captured)
    else:
        compare(captured, kind(**changes))
    assert (captured.report.recorded, captured.report.replayed, captured.report.obstacles) == (2, 5, {})


@pytest.mark.parametrize(("kind", "why"), [(Averaging, r"\['average'\] in its state"), (Alternating, r"self\.steps")])
def test_steps_that_may_differ_are_not_recorded(kind: type[Method], why: str) -> None:
    captured = Captured(kind())
    with pytest.warns(UserWarning, match=rf"not captured.*{kind.__name__}.*{why}.*capturable = True") as warned:
        compare(captured, kind())
    assert len(warned) == 1
    assert (captured.report.ordinary, captured.report.recorded) == (7, 0)
    assert list(captured.report.obstacles.values()) == [6]


class Bypassing(Own):
    """Declares a buffer and replaces its tensors by hand."""

    buffers = ("average",)

    def direction(self, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        last = self.state.get("average", gradient)
        self.state["average"] = {n: 0.5 * last[n] + 0.5 * g for n, g in gradient.items()}
        return dict(self.state["average"])


def test_a_declared_buffer_that_is_replaced_by_hand_is_not_recorded() -> None:
    captured = Captured(Bypassing())
    with pytest.warns(UserWarning, match=r"Bypassing keeps \['average'\].*self\.buffer\(\)") as warned:
        compare(captured, Bypassing())
    assert len(warned) == 1
    assert (captured.report.ordinary, captured.report.recorded) == (7, 0)
    assert list(captured.report.obstacles.values()) == [7]


@dataclass(frozen=True, kw_only=True)
class Buffered(Own):
    """Keeps an average with self.buffer(), which is right without declaring anything."""

    buffers = ("average",)

    def _step(self, passes: Passes) -> Step:
        losses, gradient = passes.gradient()
        average = self.buffer("average", passes)
        average.update(gradient, 0.5)
        with passes.ascend(list(average), self.rho) as ascent:
            perturbed = passes.accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)


@pytest.mark.parametrize("kind", [Buffered, FriendlySAM, MomentumSAM])
def test_buffers_are_recorded(kind: type[Method]) -> None:
    captured = Captured(kind())
    compare(captured, kind())
    # The first step allocates, the second is the first one with this memory.
    assert (captured.report.ordinary, captured.report.recorded, captured.report.replayed) == (2, 1, 5)
    assert captured.report.obstacles == {}


@pytest.mark.parametrize("kind", [Buffered, FriendlySAM, MomentumSAM])
def test_a_replay_with_inf_keeps_the_buffer_and_a_loaded_state_is_recorded_anew(kind: type[Method]) -> None:
    captured, method = Captured(kind(rho=0.3)), kind(rho=0.3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    for number in range(9):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number)).double()
        if number == 4:
            x[0, 0] = float("inf")
        found = []
        for taken in (captured, method):
            model.zero_grad()
            taken.backward(model, x, objective)
            found.append(grads(model))
            if number == 5:
                taken.load_state_dict(taken.state_dict())
        if number != 4:
            assert relative_error(*found) < 1e-10, number
    assert captured.report.recorded == 2
    (name,) = method.buffers
    assert relative_error(captured.state_dict()[name], method.state_dict()[name]) < 1e-10


@pytest.mark.parametrize("kind", [FreeLB, TAT, TAVAT])
def test_methods_of_the_package_with_state_are_recorded(kind: type[Method]) -> None:
    case = next(case for case in CASES if case.name == "BERT")
    model, captured, method = case.model(), Captured(kind()), kind()
    for number in range(4):
        found = []
        for taken in (captured, method):
            model.zero_grad()
            taken.backward(model, case.batch(seed=number), case.objective)
            found.append(grads(model))
        assert relative_error(*found) < 1e-4, number
    assert captured.report.obstacles == {}
    assert captured.report.replayed >= 2
