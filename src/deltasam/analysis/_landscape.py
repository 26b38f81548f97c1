"""Slices of the loss around the weights: along random directions, SAM's, and that of every instance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.analysis._common import batches_of, in_mode, tracked
from deltasam.analysis._risk import adversarial_risk
from deltasam.step.checks import check_losses, require_apart
from deltasam.step.directions import random_direction
from deltasam.step.moving import perturbed
from deltasam.step.norms import global_norm
from deltasam.step.passes import ObjectiveLike
from deltasam.step.randomness import Seed
from deltasam.step.selection import trainable

Direction = list[Tensor | None]
"""One tensor per trainable parameter; None does not move it."""


def filter_direction(model: nn.Module, *, seed: int = 0) -> Direction:
    r"""Returns a random direction with every filter scaled to the norm of its weights (Li et al. 2018).

    .. math:: d_{f} \leftarrow \frac{d_f}{\lVert d_f \rVert} \lVert w_f \rVert

    A filter is a row of a matrix. As in that work, biases and normalisation parameters do not move. A distance of 1
    is then as large as the weights themselves, in every layer.
    """
    params = list(trainable(model).values())
    drawn = random_direction(params, Seed(seed, 0))
    return [_scaled(d, p.detach()) if p.dim() > 1 else None for d, p in zip(drawn, params, strict=True)]


def gradient_direction(model: nn.Module, data: Iterable[Any], objective: ObjectiveLike) -> Direction:
    """Returns the direction of SAM over all the data: the gradient of the mean loss, with norm 1.

    Raises:
        ValueError: The gradient is zero or not finite.
    """
    params = list(trainable(model).values())
    # A sum in bfloat16 stops growing after a few hundred batches.
    total = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in params]
    with in_mode(model, False):
        for batch in batches_of(model, data, None, False, "gradient"):
            losses = objective(model, batch)
            check_losses(losses, graph=True, batch=batch)
            grads = torch.autograd.grad(losses.sum(), params, allow_unused=True)
            for sum_, grad in zip(total, grads, strict=True):
                if grad is not None:
                    sum_ += grad.to_dense() if grad.is_sparse else grad
    norm = float(global_norm(total))
    if not 0 < norm < math.inf:
        raise ValueError(f"the gradient of the mean loss has norm {norm}: SAM has no direction at these weights")
    return [(part / norm).to(p.dtype) for part, p in zip(total, params, strict=True)]


def line_slice(
    model: nn.Module,
    data: Sequence[Any],
    objective: ObjectiveLike,
    direction: Direction,
    distances: Sequence[float],
    *,
    progress: bool | None = None,
) -> list[float]:
    """Returns the mean loss at w + t * direction for every distance t, in eval mode; restores the weights.

    Cost: one forward over the data per distance.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 1.0)
        >>> data = [torch.ones(2, 1)]
        >>> line_slice(model, data, lambda m, x: m(x).squeeze(-1) ** 2, [torch.ones(1, 1)], [-1.0, 0.0, 1.0])
        [0.0, 1.0, 4.0]
    """
    return [_loss(model, data, objective, direction, t) for t in tracked(distances, None, progress, "landscape, line")]


def plane_slice(
    model: nn.Module,
    data: Sequence[Any],
    objective: ObjectiveLike,
    first: Direction,
    second: Direction,
    distances: Sequence[float],
    *,
    rows: Sequence[float] | None = None,
    progress: bool | None = None,
) -> list[list[float]]:
    """Returns the mean loss at w + s * first + t * second: one row per t, with one number per s.

    ``distances`` are the values of s, ``rows`` those of t; by default both are the same. Cost: one forward over the
    data per pair of distances.
    """
    return [
        [_loss(model, data, objective, _sum(s, first, t, second), 1.0) for s in distances]
        for t in tracked(distances if rows is None else rows, None, progress, "landscape, plane")
    ]


def instance_slice(
    model: nn.Module, data: Sequence[Any], objective: ObjectiveLike, distances: Sequence[float], **options: Any
) -> list[float]:
    """Returns the mean over the instances of the loss along each instance's gradient.

    Cost: one :func:`~deltasam.analysis.adversarial_risk` per distance.

    Raises:
        ValueError: A distance is negative.
    """
    if any(t < 0 for t in distances):
        raise ValueError(f"distances={list(distances)} must be at least 0")
    found = []
    for t in distances:
        risk = adversarial_risk(model, data, objective, rho=t or 1e-12, **options)
        found.append(risk.value if t > 0 else risk.clean)
    return found


def _loss(model: nn.Module, data: Sequence[Any], objective: ObjectiveLike, direction: Direction, t: float) -> float:
    params = list(trainable(model).values())
    require_apart(params, dict(model.named_parameters()))
    step = torch.tensor(float(t), device=params[0].device)
    total, count = torch.zeros((), dtype=torch.float64, device=step.device), 0
    with in_mode(model, False), torch.no_grad(), perturbed(params, direction, step, consume=False):
        for batch in batches_of(model, data, None, False, "loss"):
            losses = objective(model, batch)
            check_losses(losses, graph=False, batch=batch)
            total += losses.double().sum()
            count += len(losses)
    return float(total) / count  # one synchronization with the GPU


def _scaled(direction: Tensor, weights: Tensor) -> Tensor:
    rows, norms = direction.flatten(1), weights.flatten(1).norm(dim=1, keepdim=True)
    return (rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30) * norms).view_as(direction)


def _sum(s: float, first: Direction, t: float, second: Direction) -> Direction:
    moves = zip(_times(s, first), _times(t, second), strict=True)
    return [b if a is None else a if b is None else a + b for a, b in moves]


def _times(t: float, direction: Direction) -> Direction:
    return [None if part is None else t * part for part in direction]
