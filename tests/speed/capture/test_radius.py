"""The radius of a captured step: another number, a schedule or a rule needs no other recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import SAM, Layerwise, LossBudget, LossShare, PerInstanceSAM, Relative, Scheduled
from deltasam.methods import Method, Step, make_step
from deltasam.speed.capture import Captured
from helpers.taped import play_graphs_on_the_cpu

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A simulated graph on the CPU, or a real one."""
    if request.param == "cpu":
        play_graphs_on_the_cpu(monkeypatch)
    return str(request.param)


def model_on(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4)).to(device)


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean(1)


def run(take: Callable[[Any], Any], radii: list[Any], make: Callable[..., Method], device: str) -> tuple[Any, Any]:
    """The gradient and the radius of every step; all steps use one model and one state."""
    model, x = model_on(device), torch.linspace(-1, 1, 12).view(4, 3).to(device)
    method = make(rho=radii[0])
    taken, history = take(method), []
    for rho in radii:
        method = method.replace(rho=rho)
        if isinstance(taken, Captured):
            taken.method = method
        else:
            taken = method
        model.zero_grad()
        step = taken.backward(model, x, losses)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        history.append((gradient.clone(), torch.zeros(()) if step.radius is None else step.radius.clone()))
    return history, taken


def check(found: Any, wanted: Any) -> None:
    for (gradient, radius), (other, other_radius) in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(radius.to(other_radius), other_radius, rtol=1e-4, atol=1e-6)


RADII: dict[str, list[Any]] = {
    "numbers": [0.1, 0.1, 0.3, 0.7, 0.05],
    "budgets": [LossBudget(s, at_most=m) for s, m in ((0.1, 1.0), (0.1, 1.0), (0.3, 1.0), (5.0, 0.2), (0.2, 0.3))],
    "shares": [LossShare(s) for s in (0.1, 0.1, 0.3, 0.6)],
    "relative": [Relative(s) for s in (0.1, 0.1, 0.2, 0.3)],
    "relative, per tensor": [Relative(s, per="tensor") for s in (0.1, 0.1, 0.2, 0.3)],
    "layerwise": [Layerwise(s) for s in (0.1, 0.1, 0.2, 0.3)],
    "groups": [{"norms": 0, "biases": LossBudget(s), "rest": 3 * s} for s in (0.1, 0.1, 0.2, 0.3)],
}


@pytest.mark.parametrize("make", [SAM, PerInstanceSAM])
@pytest.mark.parametrize("radii", RADII.values(), ids=RADII)
def test_another_number_replays_the_same_recording(make: Callable[..., Method], radii: list[Any], device: str) -> None:
    found, captured = run(Captured, radii, make, device)
    wanted, _ = run(lambda method: method, radii, make, device)
    check(found, wanted)
    assert captured.report.recorded == 1
    assert captured.report.replayed == len(radii) - 1
    assert not captured.report.obstacles


def test_a_schedule_replays_and_its_plain_steps_are_plain(device: str) -> None:
    radii = [Scheduled(0.4, start=3, warmup=4, unit="steps")] * 9
    found, captured = run(Captured, radii, SAM, device)
    wanted, _ = run(lambda method: method, radii, SAM, device)
    check(found, wanted)
    assert captured.report.recorded == 2  # plain training, and SAM
    assert captured.report.ordinary == 2
    assert captured.report.replayed == 7


def test_another_kind_of_rule_is_recorded_anew(device: str) -> None:
    radii = [0.1, 0.1, LossBudget(0.1), LossBudget(0.1), 0.2]
    found, captured = run(Captured, radii, SAM, device)
    wanted, _ = run(lambda method: method, radii, SAM, device)
    check(found, wanted)
    assert captured.report.recorded == 2


@dataclass(frozen=True, kw_only=True)
class ReadsRho(Method):
    """Uses the number itself, which a recording keeps."""

    rho: float = 0.1

    def _step(self, passes: Any) -> Step:
        at_w, grads = passes.gradient()
        with passes.ascend(grads, self.rho) as ascent:
            perturbed = passes.accumulate()
        return make_step(passes, at_w, perturbed=perturbed, ascent=ascent)


def test_a_method_that_reads_rho_is_recorded_for_every_value(device: str) -> None:
    radii = [0.1, 0.1, 0.5, 0.5]
    found, captured = run(Captured, radii, ReadsRho, device)
    wanted, _ = run(lambda method: method, radii, ReadsRho, device)
    check(found, wanted)
    assert captured.report.recorded == 2


def test_a_class_says_how_it_uses_its_radius() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Below(SAM):
        def _step(self, passes: Any) -> Step:
            return make_step(passes, passes.losses() * self.rho)

    assert SAM.reads_radius
    assert PerInstanceSAM.reads_radius
    assert not ReadsRho.reads_radius
    assert not Below.reads_radius
