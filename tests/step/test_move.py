"""The move to w + eps does not write to the gradients, which others may hold, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import SAM
from deltasam.step.directions import random_direction
from deltasam.step.moving import _add_fused_, add_scaled_
from deltasam.step.randomness import Seed


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(-1)


def sam_by_hand(model: nn.Module, x: Tensor, rho: float) -> list[Tensor]:
    params = list(model.parameters())
    gradient = torch.autograd.grad(objective(model, x).mean(), params)
    norm = torch.stack([g.square().sum() for g in gradient]).sum().sqrt()
    moved = {n: p + rho * g / norm for (n, p), g in zip(model.named_parameters(), gradient, strict=True)}
    at = {name: value.detach().requires_grad_() for name, value in moved.items()}
    losses = torch.func.functional_call(model, at, (x,)).square().sum(-1)
    return list(torch.autograd.grad(losses.mean(), list(at.values())))


class Joined(nn.Module):
    """The gradients of a and b are views of the gradient of c."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.randn(3))
        self.a = nn.Parameter(torch.randn(3))
        self.c = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.cat([self.a, self.b]) + self.c)


def test_gradients_that_share_memory() -> None:
    model, x = Joined().double(), torch.randn(4, 6, dtype=torch.float64)
    expected = sam_by_hand(model, x, 0.5)
    SAM(rho=0.5).backward(model, x, objective)
    for p, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_a_hook_keeps_is_unchanged() -> None:
    model, kept, copies = nn.Linear(3, 1), [], []
    model.weight.register_hook(kept.append)
    model.weight.register_hook(lambda g: copies.append(g.clone()))
    SAM(rho=0.5).backward(model, torch.randn(4, 3), objective)
    assert len(kept) == 2
    assert all(torch.equal(*pair) for pair in zip(kept, copies, strict=True))


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (w * x).sum()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.saved_tensors[0], None  # a gradient in the memory of another owner


class WithStatistics(nn.Module):
    def __init__(self, view: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.register_buffer("mean", torch.randn(3))
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return x * _Dot.apply(self.w, self.mean[:] if self.view else self.mean)


@pytest.mark.parametrize("view", [False, True])
def test_a_buffer_that_is_returned_as_a_gradient_is_unchanged(view: bool) -> None:
    model = WithStatistics(view)
    before = model.mean.clone()
    SAM().backward(model, torch.ones(2, 1), lambda m, x: m(x).squeeze(-1))
    assert torch.equal(model.mean, before)


LAID_OUT = {
    "alike": lambda: torch.arange(6.0).view(2, 3),
    "transposed": lambda: torch.arange(6.0).view(3, 2).t(),
    "expanded": lambda: torch.ones(1).expand(2, 3),
    "a part": lambda: torch.arange(12.0).view(2, 6)[:, ::2],
}


@pytest.mark.parametrize("of_direction", LAID_OUT)
@pytest.mark.parametrize("of_weights", ["alike", "transposed"])
def test_the_fused_kernel_gets_directions_with_the_strides_of_the_weights(of_weights: str, of_direction: str) -> None:
    """Gradients of ``einsum``, of sums and of channels-last convolutions have other strides than the weights."""
    weights = [LAID_OUT[of_weights]().clone(), torch.zeros(2, 3)]
    direction = [LAID_OUT[of_direction](), torch.ones(2, 3)]
    wanted = [w + 0.5 * d for w, d in zip(weights, direction, strict=True)]
    _add_fused_(weights, direction, torch.tensor(0.5))
    assert all(torch.equal(*pair) for pair in zip(weights, wanted, strict=True))
    assert torch.equal(direction[0], LAID_OUT[of_direction]())
    _add_fused_(weights, [torch.full_like(d, torch.inf) for d in direction], torch.tensor(0.0))
    assert all(torch.equal(*pair) for pair in zip(weights, wanted, strict=True))


@pytest.mark.gpu
def test_gradients_with_other_strides_on_a_gpu() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 3))
            self.conv = nn.Conv2d(2, 4, 3, padding=1)
            self.gap = nn.Parameter(torch.randn(4, 8)[:, ::2])

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x.to(memory_format=torch.channels_last)).mean(2)
            return torch.einsum("nct,ot->nco", h, self.w).flatten(1) + self.w.sum() + self.gap.flatten()

    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model, x = Odd().to(device), torch.randn(2, 2, 3, 3).to(device)
        SAM(rho=0.5).backward(model, x, objective)
        found.append([p.grad.cpu() for p in model.parameters()])
    for pair in zip(*found, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_zero_step_ignores_directions_that_are_not_finite(sparse: bool) -> None:
    """Zero times infinity is NaN. The weights have several dtypes, which one kernel does not support."""
    weights = [torch.randn(3, 2), torch.randn(2, dtype=torch.float64)]
    before = [w.clone() for w in weights]
    bad = torch.full((3, 2), torch.inf)
    direction = [bad.to_sparse(1) if sparse else bad, torch.full((2,), torch.nan, dtype=torch.float64)]
    add_scaled_(weights, direction, torch.tensor(0.0))
    assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True))
    add_scaled_(weights, [torch.ones(3, 2), torch.ones(2, dtype=torch.float64)], torch.tensor(0.5))
    assert all(torch.equal(w, b + 0.5) for w, b in zip(weights, before, strict=True))


def test_each_dtype_has_its_own_random_numbers() -> None:
    """Each dtype is drawn in one call; float64 gets the numbers of float32, so sharing one stream would show."""
    params = [torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, 3)]
    first, second, third = random_direction(params, Seed(3, 0))
    assert [r.dtype for r in (first, second, third)] == [p.dtype for p in params]
    assert not torch.allclose(first.double(), second)
    assert not torch.allclose(first, third)
    alone = random_direction([params[0].double()], Seed(3, 0))[0]
    assert torch.equal(alone, first.double())
