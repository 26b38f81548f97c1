"""Closures that call ``backward()``: which gradients enter a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from deltasam.integrations import MethodOptimizer
from deltasam.integrations._closure_passes import ClosurePasses
from deltasam.methods import ERM, GSAM, SAM, DeltaSAM, LookSAM, Method
from deltasam.weighting import LossWeights


def name(method: Method) -> str:
    return type(method).__name__


def parts() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A model, a head that is not part of it, and a batch."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    return body.double(), nn.Linear(3, 2).double(), torch.randn(5, 4).double(), torch.randint(2, (5,))


def closure_of(body: nn.Module, head: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """An LBFGS-style closure without ``zero_grad()``, which ``step`` calls."""

    def closure() -> Tensor:
        loss = cross_entropy(head(body(x)), y)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize(
    "method", [ERM(), SAM(rho=0.3), GSAM(rho=0.3), LookSAM(rho=0.3)], ids=lambda m: type(m).__name__
)
def test_parameters_outside_the_model_have_the_gradient_of_one_pass(method: Method) -> None:
    ends = []
    for style in ("backward", "losses"):
        body, head, x, y = parts()
        sgd = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1.0)
        optimizer = MethodOptimizer(sgd, replace(method, state={}), body, closure=style)  # type: ignore[arg-type]
        if style == "backward":
            optimizer.step(closure_of(body, head, x, y))
        else:
            optimizer.step(lambda: cross_entropy(head(body(x)), y, reduction="none"))  # noqa: B023 - called right here
        ends.append([p.detach().clone() for p in (*body.parameters(), *head.parameters())])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", [SAM(rho=0.5), GSAM(rho=0.5)], ids=name)
def test_old_gradients_do_not_change_the_ascent(method: Method) -> None:
    """Another optimizer updates a part of the model, so ``zero_grad`` does not clear it."""
    ends = []
    for left in (0.0, 1.0):
        body, head, x, y = parts()
        both = nn.Sequential(body, head)
        optimizer = MethodOptimizer(torch.optim.SGD(head.parameters(), lr=1.0), method, both)
        for p in body.parameters():
            p.grad = torch.full_like(p, left)
        optimizer.step(closure_of(body, head, x, y))
        ends.append(head.weight.detach().clone())
    assert torch.equal(*ends)


def test_a_step_under_no_grad() -> None:
    body, head, x, y = parts()
    both = nn.Sequential(body, head)
    optimizer = MethodOptimizer(torch.optim.SGD(both.parameters(), lr=1.0), SAM(), both)
    before = head.weight.detach().clone()
    with torch.no_grad():  # as torch's optimizers call their closures
        optimizer.step(closure_of(body, head, x, y))
    assert not torch.equal(head.weight, before)


def test_the_passes_are_counted() -> None:
    body, head, x, y = parts()
    method = SAM()
    step = method.run_step(ClosurePasses(method, nn.Sequential(body, head), closure_of(body, head, x, y)))
    assert (step.forwards, step.backwards) == (2, 2)


def test_weights_from_the_losses_need_losses() -> None:
    """A weighting without probes, whose losses would be needed first."""
    body, head, x, y = parts()
    both = nn.Sequential(body, head)
    optimizer = MethodOptimizer(torch.optim.SGD(both.parameters(), lr=1.0), DeltaSAM(weighting=LossWeights()), both)
    with pytest.raises(ValueError, match=r"DeltaSAM .*closure="):
        optimizer.step(closure_of(body, head, x, y))


def test_hooks_and_zero_grad_are_the_optimizers_own() -> None:
    body, head, x, y = parts()
    both = nn.Sequential(body, head)
    optimizer = MethodOptimizer(torch.optim.SGD(both.parameters(), lr=1.0), SAM(), both)
    before, seen = head.weight.detach().clone(), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.equal(head.weight, before)))
    optimizer.register_step_post_hook(lambda *_: seen.append(torch.equal(head.weight, before)))
    optimizer.step(closure_of(body, head, x, y))
    assert seen == [True, False]  # at w, and after the update
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in both.parameters())


@pytest.mark.parametrize("method", [SAM(rho=0.3), GSAM(rho=0.3), LookSAM(rho=0.3)], ids=name)
def test_gradients_that_are_views_into_reused_memory(method: Method) -> None:
    """DDP's gradients are views with ``gradient_as_bucket_view=True``."""
    ends = []
    for in_bucket in (False, True):
        body, head, x, y = parts()
        both = nn.Sequential(body, head)
        params = list(both.parameters())
        bucket = torch.split(torch.zeros(sum(p.numel() for p in params)).double(), [p.numel() for p in params])

        def closure(params: list[nn.Parameter] = params, both: nn.Module = both) -> Tensor:
            loss = cross_entropy(both(x), y)  # noqa: B023 - called in this turn
            found = torch.autograd.grad(loss, params)
            for p, place, grad in zip(params, bucket, found, strict=True):  # noqa: B023
                p.grad = place.copy_(grad.flatten()).view_as(p) if in_bucket else grad  # noqa: B023
            return loss

        MethodOptimizer(torch.optim.SGD(params, lr=1.0), replace(method, state={}), both).step(closure)
        ends.append([p.detach().clone() for p in params])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)
