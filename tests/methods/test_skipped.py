"""A step that skips its perturbation takes the plain gradient of all instances."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import ASAM, ESAM, GSAM, SAM, DeltaSAM, FisherSAM, LookSAM, Method, PerInstanceSAM, Step


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 1)
        self.unused = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).squeeze(-1)


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) ** 2


METHODS = [SAM, ASAM, GSAM, DeltaSAM, FisherSAM, ESAM, lambda **o: ESAM(gamma=0.3, **o)]


@pytest.mark.parametrize("make", METHODS, ids=["sam", "asam", "gsam", "delta-sam", "fisher-sam", "esam", "esam-0.3"])
def test_the_plain_gradient(make: type[Method]) -> None:
    model, x = Unused().double(), torch.randn(8, 3, dtype=torch.float64)
    plain = torch.autograd.grad(objective(model, x).mean(), model.used.weight)[0]
    step = make(params=lambda name, p: "unused" in name).backward(model, x, objective)
    assert "took the plain gradient" in str(step.why_skipped)
    assert step.perturbed_losses is not None
    torch.testing.assert_close(step.perturbed_losses, step.losses)
    torch.testing.assert_close(model.used.weight.grad, plain, rtol=1e-12, atol=1e-12)


def test_esam_selects_where_it_perturbs() -> None:
    model, x = Unused().double(), torch.randn(8, 3, dtype=torch.float64)
    plain = torch.autograd.grad(objective(model, x).mean(), model.used.weight)[0]
    step = ESAM(rho=1e-9, gamma=0.3, beta=1.0).backward(model, x, objective)
    assert step.why_skipped is None
    assert not torch.allclose(model.used.weight.grad, plain, rtol=1e-3)


def test_skipped_steps_are_counted_and_look_sam_reuses_nothing_of_them() -> None:
    """Without a perturbation SAM's gradient is the plain one; their difference is rounding and must not be reused."""
    model, x = Unused(), torch.randn(64, 3)
    plain = torch.autograd.grad(objective(model, x).mean(), model.used.weight)[0]
    method = LookSAM(k=3, params=lambda name, p: "unused" in name)
    for number, (forwards, skipped) in enumerate([(2, 1), (1, 1), (1, 1), (2, 2)]):
        model.zero_grad()
        assert method.backward(model, x, objective).forwards == forwards, number
        assert method.skipped == skipped
        torch.testing.assert_close(model.used.weight.grad, plain, rtol=1e-5, atol=1e-6)


def test_metrics_of_a_step() -> None:
    perturbed, weights = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 3.0])
    step = Step(
        losses=torch.tensor([1.0, 3.0]), forwards=2, backwards=2, perturbed_losses=perturbed, weights=weights,
        grad_norm=torch.tensor(0.5), skipped=torch.tensor(False),
    )  # fmt: skip
    assert float(step.sharpness) == pytest.approx(2 / 3 - 2)  # other instances, and a smaller loss
    assert step.metrics() == pytest.approx(
        {"loss": 2.0, "sharpness": 2 / 3 - 2, "grad_norm": 0.5, "skipped": 0.0}
        | {"weights_mean": 2.0, "weights_max": 3.0, "weights_std": 1.0}
    )
    one = dataclasses.replace(step, weights=torch.tensor([2.0]))
    assert one.metrics()["weights_std"] == 0  # not nan for one instance


def test_another_radius_goes_on_with_the_same_state() -> None:
    method, model, x = SAM(rho=0.1), Unused(), torch.randn(4, 3)
    other = method.replace(rho=0.2)
    other.backward(model, x, objective)
    method.backward(model, x, objective)
    assert (method.steps, other.steps) == (2, 2)
    assert (method.rho, other.rho) == (0.1, 0.2)


def test_look_sam_if_nothing_is_orthogonal_to_the_gradient() -> None:
    """With a single parameter entry both gradients have the same direction: there is nothing to reuse."""
    model, x = nn.Linear(1, 1, bias=False).double(), torch.ones(2, 1, dtype=torch.float64)
    method = LookSAM(rho=0.1, k=2)
    for _ in range(2):
        model.zero_grad()
        method.backward(model, x, lambda model, x: model(x).squeeze(-1) ** 2)
    torch.testing.assert_close(model.weight.grad, 2 * model.weight.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("engine", ["low-rank", "loop"])
def test_instances_are_skipped_if_all_of_them_are(engine: str) -> None:
    """An instance without a gradient stays at w; the step counts as skipped only if nothing moved."""
    model, x = Unused().double(), torch.randn(4, 3, dtype=torch.float64)
    chosen = PerInstanceSAM(engine=engine, params=lambda name, p: "unused" in name)
    assert bool(chosen.backward(model, x, objective).skipped)
    factors = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    some = PerInstanceSAM(engine=engine).backward(model, x, lambda model, x: factors * model(x) ** 2)
    assert not some.skipped
    assert some.perturbed_losses[1] == some.losses[1] == 0


def test_gsam_if_the_perturbed_gradient_is_zero() -> None:
    """A perturbed gradient of zero has no direction; dividing by its norm would give nan."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.9)
    x = torch.ones(2, 1, dtype=torch.float64)
    step = GSAM(rho=0.5).backward(model, x, lambda model, x: model(x).squeeze(-1).clamp(max=1.0))
    assert not step.skipped
    assert model.weight.grad.tolist() == [[0.0]]
