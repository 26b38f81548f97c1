"""What the base class does for a method that a user wrote."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from deltasam.integrations import MethodOptimizer
from deltasam.methods import ERM, SAM, Method, Step, make_step, radius
from deltasam.objectives import Classification
from deltasam.step.passes import Passes
from helpers.problems import TRANSFORMER, grads, relative_error


@dataclass(frozen=True, kw_only=True)
class Downhill(Method):
    """The example of ``Method``."""

    rho: float = 0.05

    def _step(self, passes: Passes) -> Step:
        losses, gradient = passes.gradient()
        with passes.ascend(gradient, -self.rho) as ascent:
            perturbed = passes.accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)


def test_rho_zero_is_plain_training() -> None:
    found = []
    for method in (ERM(), Downhill(rho=0.0), Downhill(rho=-0.0)):
        model, batch, objective = TRANSFORMER.make()
        torch.manual_seed(3)
        step = method.backward(model, batch, objective)
        assert (step.forwards, step.backwards, step.perturbed_losses) == (1, 1, None)
        assert method.steps == 1
        found.append((grads(model), torch.rand(())))
    assert all(relative_error(grad, found[0][0]) == 0 and torch.equal(draw, found[0][1]) for grad, draw in found[1:])


def test_rho_zero_in_an_optimizer_with_a_closure() -> None:
    found = []
    for method in (ERM(), Downhill(rho=0.0)):
        torch.manual_seed(0)
        model, x = nn.Linear(3, 1), torch.ones(4, 3)
        optimizer = MethodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), method, model)

        def closure(model: nn.Module = model, x: Tensor = x) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        found.append(model.weight.detach().clone())
    assert torch.equal(*found)


def test_a_negative_radius_goes_downhill() -> None:
    """The gradient at w - rho g / |g|, by hand."""
    model, batch, objective = TRANSFORMER.make()
    torch.manual_seed(3)
    objective(model, batch).mean().backward()
    plain = grads(model)
    length = torch.cat([g.flatten() for g in plain.values()]).norm()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in plain:
                p.sub_(0.1 * plain[name] / length)
    torch.manual_seed(3)
    objective(model, batch).mean().backward()
    wanted = grads(model)

    model, batch, objective = TRANSFORMER.make()
    torch.manual_seed(3)
    step = Downhill(rho=0.1).backward(model, batch, objective)
    assert relative_error(grads(model), wanted) < 1e-12
    assert relative_error(grads(model), plain) > 1e-3
    assert float(step.sharpness) < 0
    assert not bool(step.skipped)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_method_may_override_is_erm() -> None:
    """A method whose step with rho = 0 is not plain training."""

    @dataclass(frozen=True, kw_only=True)
    class Doubled(SAM):
        def is_erm(self) -> bool:
            return False

        def _step(self, passes: Passes) -> Step:
            step = super()._step(passes)
            for p in passes.trainable.values():
                p.grad = None if p.grad is None else 2 * p.grad
            return step

    model, x = nn.Linear(3, 1), torch.ones(4, 3)
    step = Doubled(rho=0.0).backward(model, x, lambda m, x: m(x).squeeze(-1).square())
    found = grads(model)
    model.zero_grad()
    ERM().backward(model, x, lambda m, x: m(x).squeeze(-1).square())
    assert (step.forwards, step.backwards) == (2, 2)
    assert relative_error(found, {name: 2 * g for name, g in grads(model).items()}) == pytest.approx(0)


@dataclass(frozen=True, kw_only=True)
class UpAndDown(Method):
    """Ascends twice along one list of directions, which the first ascent empties."""

    rho: float = radius()
    consume: bool = True

    def _step(self, passes: Passes) -> Step:
        losses, grads = passes.gradient()
        with passes.ascend(grads, self.radius, consume=self.consume):
            passes.losses()
        with passes.ascend(grads, -self.radius) as ascent:
            perturbed = passes.accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)


def test_a_list_of_directions_used_twice_raises() -> None:
    model = nn.Linear(3, 2)
    batch = (torch.randn(4, 3), torch.randint(2, (4,)))
    with pytest.raises(ValueError, match=r"0 tensors for 2 parameters.*consume=False"):
        UpAndDown(rho=0.1).backward(model, batch, Classification())
    step = UpAndDown(rho=0.1, consume=False).backward(model, batch, Classification())
    assert step.sharpness < 0
