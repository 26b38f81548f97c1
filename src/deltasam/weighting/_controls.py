"""Weights that carry no information: the controls of an honest experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltasam.passes import Passes
from deltasam.weighting._base import Weighting, seed_of, usable
from deltasam.weighting._finite_difference import FiniteDifference


@dataclass(frozen=True, kw_only=True)
class Uniform(Weighting):
    """g = 1: delta-SAM is then SAM. Cost: none."""

    def probe(self, passes: Passes, *, rho: float, eta: float, seed: int) -> Callable[[Tensor], Tensor]:
        """Nothing to probe."""
        return torch.ones_like


@dataclass(frozen=True, kw_only=True)
class RandomWeights(Weighting):
    """The weights of another weighting, shuffled within the batch: same distribution, same cost, no information.

    If training with these does as well as with the real ones, curvature was not the cause.

    Attributes:
        of: The weighting whose weights are shuffled.
    """

    of: Weighting = field(default_factory=FiniteDifference)

    def probe(self, passes: Passes, *, rho: float, eta: float, seed: int) -> Callable[[Tensor], Tensor]:
        """Probes as the other weighting does."""
        inner = self.of.probe(passes, rho=rho, eta=eta, seed=seed)
        generator = torch.Generator().manual_seed(seed_of(seed, -1))

        def weights(losses: Tensor) -> Tensor:
            order = torch.randperm(losses.shape[0], generator=generator)
            return usable(inner(losses))[order.to(losses.device)]

        return weights
