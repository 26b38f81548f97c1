"""The slow reference: one instance after the other, with weights that are really moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Exact:
    losses: Tensor
    norms: Tensor
    perturbed: Tensor
    gradient: dict[str, Tensor]


def groups_of(size: int, m: int) -> list[list[int]]:
    return [list(range(start, min(start + m, size))) for start in range(0, size, m)]


def loop(model: nn.Module, run: Callable[[], Tensor], rho: float, group: int = 1) -> Exact:
    """``run()`` passes the whole batch with the same random draws every time, so the masks are the same."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses = run()
    size = losses.shape[0]
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    perturbed, norms = losses.detach().clone(), []
    for members in groups_of(size, group):
        losses = run()
        grads = torch.autograd.grad(losses[members].sum(), list(params.values()), allow_unused=True)
        norm = torch.stack([g.square().sum() for g in grads if g is not None]).sum().sqrt()
        norms.append(norm)
        before = [p.detach().clone() for p in params.values()]
        with torch.no_grad():
            for p, g in zip(params.values(), grads, strict=True):
                if g is not None and norm > 0:
                    p.add_(g * (rho / norm))
        moved = run()[members]
        grads = torch.autograd.grad(moved.sum() / size, list(params.values()), allow_unused=True)
        with torch.no_grad():
            for p, value in zip(params.values(), before, strict=True):
                p.copy_(value)
        perturbed[members] = moved.detach()
        for name, g in zip(params, grads, strict=True):
            if g is not None:
                total[name] += g
    return Exact(losses.detach(), torch.stack(norms), perturbed, total)


def ascended(
    model: nn.Module, run: Callable[[], Tensor], rho: float, steps: int, stride: float, members: list[int]
) -> Tensor:
    """Losses of instances that share a perturbation, after steps of this length inside the ball."""
    params = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in params]
    eps = [torch.zeros_like(p) for p in params]
    for _ in range(steps):
        grads = torch.autograd.grad(run()[members].sum(), params, allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]
        norm = torch.stack([g.norm() for g in grads]).norm()
        eps = [e + stride * g / norm for e, g in zip(eps, grads, strict=True)]
        size = torch.stack([e.norm() for e in eps]).norm()
        eps = [e * min(1.0, rho / float(size)) for e in eps]
        with torch.no_grad():
            for p, w, e in zip(params, start, eps, strict=True):
                p.copy_(w + e)
    losses = run()[members].detach()
    with torch.no_grad():
        for p, w in zip(params, start, strict=True):
            p.copy_(w)
    return losses


def relative(mine: Tensor, exact: Tensor) -> float:
    return float((mine - exact).norm() / exact.norm().clamp_min(1e-30))


def gradient_errors(mine: dict[str, Tensor | None], exact: dict[str, Tensor]) -> float:
    """The largest error of a parameter's gradient, relative to its norm (at least 1e-3 of the total norm)."""
    whole = torch.stack([g.norm() for g in exact.values()]).norm()
    errors = []
    for name, g in exact.items():
        found = mine.get(name)
        found = torch.zeros_like(g) if found is None else found
        errors.append(float((found - g).norm() / torch.maximum(g.norm(), 1e-3 * whole)))
    return max(errors)
