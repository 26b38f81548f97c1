"""Random perturbations of embeddings, their norms per instance, and the ball they are kept in."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from deltasam.objectives.regularisers._embeddings import Site

Distribution = Literal["uniform", "normal"]
Norm = Literal["l2", "linf"]


def draw(
    site: Site, scale: float, distribution: Distribution = "uniform", *, generator: torch.Generator | None = None
) -> Tensor:
    """U(-scale, scale) or N(0, scale^2) in every entry, zero at padding; from torch's global stream by default."""
    noise = site.empty()
    if distribution == "uniform":
        return site.unpadded(noise.uniform_(-scale, scale, generator=generator))
    return site.unpadded(noise.normal_(0.0, scale, generator=generator))


def row_norm(values: Tensor, norm: Norm) -> Tensor:
    """The norm of every row over all its other dimensions, ``(rows, 1, ...)``: broadcasts against the values."""
    if values.ndim == 1:  # an empty dim would mean all dimensions
        return values.abs()
    order = 2.0 if norm == "l2" else torch.inf
    dims = tuple(range(1, values.ndim))
    norms: Tensor = torch.linalg.vector_norm(values, order, dim=dims, keepdim=True)
    return norms


def uphill(gradient: Tensor, norm: Norm) -> Tensor:
    """The gradient of every row divided by its norm; zero if the norm is zero or an entry is not finite.

    Does not synchronise. The gradient is divided by its largest entry first, so that the squares of tiny or huge
    (loss-scaled) gradients neither underflow nor overflow.
    """
    largest = row_norm(gradient, "linf")
    sound = torch.isfinite(largest) & (largest > 0)
    unit = torch.where(
        sound, gradient / torch.where(sound, largest, torch.ones_like(largest)), torch.zeros_like(gradient)
    )
    length = row_norm(unit, norm)
    return unit / torch.where(length > 0, length, torch.ones_like(length))


def project(delta: Tensor, radius: float, norm: Norm) -> Tensor:
    """The nearest point in the ball of every row: clamped entries (linf), or shortened to the radius (l2)."""
    if norm == "linf":
        return delta.clamp(-radius, radius)
    length = row_norm(delta, "l2")
    return torch.where(length > radius, delta * (radius / length), delta)
