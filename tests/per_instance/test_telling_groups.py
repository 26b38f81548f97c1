"""The comparison with autograd: a group without a finite gradient says nothing, and nothing is concluded from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import PerInstanceSAM
from deltasam.per_instance import InstancesMixedError, UncoveredError, record
from helpers.instance_reference import relative


class Unseen(nn.Module):
    """Uses a weight that no module holds in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 1)
        self.held = [self.a.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(x @ self.held[0].T))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1) ** 2


def error(model: nn.Module, x: Tensor, objective: Callable[..., Tensor]) -> float:
    found = []
    for engine in ("auto", "loop"):
        model.zero_grad()
        PerInstanceSAM(rho=0.1, engine=engine).backward(model, x, objective)  # type: ignore[arg-type]
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return relative(found[0], found[1])


def test_a_first_step_that_overflows_proves_nothing() -> None:
    model, x = Unseen(), torch.randn(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PerInstanceSAM(rho=0.1).backward(model, x, squares, scale=3e38)
    with pytest.warns(UserWarning, match=r"a\.weight.*no rule"):
        assert error(model, x, squares) < 1e-6


def hinge(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, active = batch
    return model(x).squeeze(-1) ** 2 * active


def test_a_last_instance_without_a_gradient_proves_nothing() -> None:
    model, x = Unseen().double(), torch.randn(4, 3).double()
    with pytest.warns(UserWarning, match=r"a\.weight.*no rule"):
        PerInstanceSAM(rho=0.1).backward(model, (x, torch.tensor([1.0, 1.0, 1.0, 0.0]).double()), hinge)


def test_mixing_is_seen_though_the_last_instance_has_no_gradient() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), torch.randn(4, 3).double()
    active = torch.tensor([1.0, 1.0, 1.0, 0.0]).double()

    def run() -> Tensor:
        scores = model(x).squeeze(-1)
        return (scores - scores.mean()) ** 2 * active

    with pytest.raises(InstancesMixedError, match="depends on the other instances"):
        record(model, run)


class WithAnother(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_instance_that_is_not_finite_is_no_fault_of_the_engine(value: float) -> None:
    x = torch.randn(4, 3)
    x[1] = value
    step = PerInstanceSAM(engine="low-rank").backward(WithAnother(), x, squares)  # the loop would be an error
    assert (step.forwards, step.backwards) == (2, 2)
    assert torch.isfinite(step.perturbed_losses[[0, 2, 3]]).all()


def test_a_batch_without_any_gradient_proves_nothing() -> None:
    model, x = Unseen().double(), torch.randn(4, 3).double()
    PerInstanceSAM(rho=0.1).backward(model, (x, torch.zeros(4).double()), hinge)
    with pytest.warns(UserWarning, match=r"a\.weight.*no rule"):
        PerInstanceSAM(rho=0.1).backward(model, (x, torch.ones(4).double()), hinge)


def test_only_unseen_uses_are_not_taken_for_no_use() -> None:
    model, x = Unseen().double(), torch.randn(4, 3).double()
    with pytest.raises(UncoveredError, match=r"a\.weight"):
        record(model, lambda: squares(model, x), {"a.weight": model.a.weight})


@pytest.mark.parametrize("group", [1, 2, 3])
def test_rows_of_the_same_group_do_not_mix(group: int) -> None:
    """Norms over a batch of several rows per instance: not every row is another instance."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double()
    held = [model[0].weight]
    x = torch.randn(8, 3).double()

    def run() -> Tensor:
        h = model[1](x @ held[0].T + model[0].bias)
        return model[3](h.tanh()).view(4, 2).square().sum(1)

    with pytest.raises(UncoveredError, match=r"0\.weight"):
        record(model, run, size=4, group=group)
