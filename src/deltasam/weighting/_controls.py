"""Weights without probes, or without information: the controls of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltasam.step.passes import Passes
from deltasam.step.radius import Number
from deltasam.step.randomness import Seed, seeded_generator
from deltasam.weighting._base import Weighting, usable
from deltasam.weighting._finite_difference import FiniteDifference


@dataclass(frozen=True, kw_only=True)
class Uniform(Weighting):
    """g = 1, which makes delta-SAM SAM. Cost: none.

    Example:
        >>> from deltasam import DeltaSAM
        >>> method = DeltaSAM(rho=0.05, weighting=Uniform())
    """

    def probe(self, passes: Passes, *, rho: Number, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        """Makes no passes."""
        return torch.ones_like


@dataclass(frozen=True, kw_only=True)
class LossWeights(Weighting):
    """g_i = l_i(w), the loss itself; 0 where it is negative. Cost: none; a step costs what SAM's costs.

    On CoLA, the one GLUE task where delta-SAM was better than SAM in our runs (at a radius too large for SAM), Eq. 5
    gives large weights to instances with large losses. Training with the losses as weights did as well
    (docs/results.md): the probes were not needed.
    Instances with wrong labels keep large losses, and therefore large weights.

    Example:
        >>> from deltasam import DeltaSAM
        >>> method = DeltaSAM(rho=0.05, weighting=LossWeights())
    """

    def probe(self, passes: Passes, *, rho: Number, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        """Makes no passes."""
        return lambda losses: losses.detach().clamp(min=0)


@dataclass(frozen=True, kw_only=True)
class RandomWeights(Weighting):
    """The weights of another weighting, shuffled within the batch: same distribution, same cost, no information.

    If training with these works as well as with the original weights, curvature was not the cause.

    Attributes:
        of: The weighting whose weights are shuffled.

    Example:
        >>> from deltasam import DeltaSAM
        >>> method = DeltaSAM(rho=0.05, weighting=RandomWeights())  # shuffles those of Eq. 5
    """

    of: Weighting = field(default_factory=FiniteDifference)

    def __post_init__(self) -> None:
        """Checks the other weighting."""
        if not isinstance(self.of, Weighting):
            raise TypeError(f"of={self.of!r} must be a Weighting such as FiniteDifference()")

    def probe(self, passes: Passes, *, rho: Number, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        """Probes as the other weighting does."""
        inner = self.of.probe(passes, rho=rho, eta=eta, seed=seed)

        def weights(losses: Tensor) -> Tensor:
            generator = seeded_generator(losses.device, seed.child(-1))
            return usable(inner(losses))[torch.randperm(len(losses), generator=generator, device=losses.device)]

        return weights
