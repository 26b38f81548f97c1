"""Weights that cost nothing or know nothing: the controls of an honest experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltasam.step.passes import Passes
from deltasam.step.randomness import Seed, seeded_generator
from deltasam.weighting._base import Weighting, usable
from deltasam.weighting._finite_difference import FiniteDifference


@dataclass(frozen=True, kw_only=True)
class Uniform(Weighting):
    """g = 1: delta-SAM is then SAM. Cost: none.

    Example:
        >>> from deltasam import DeltaSAM
        >>> method = DeltaSAM(rho=0.05, weighting=Uniform())
    """

    def probe(self, passes: Passes, *, rho: float, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        """Nothing to probe."""
        return torch.ones_like


@dataclass(frozen=True, kw_only=True)
class LossWeights(Weighting):
    """g_i = l_i(w), the loss itself; 0 where it is negative. Cost: none, a step is SAM's.

    On CoLA, the one GLUE task where delta-SAM was better than SAM in our runs (at a radius too large for SAM), the
    weights of Eq. 5 lie on instances with large losses, and training with these instead did as well
    (docs/results.md): the probes were not needed.
    Instances with wrong labels keep large losses, and so large weights.

    Example:
        >>> from deltasam import DeltaSAM
        >>> method = DeltaSAM(rho=0.05, weighting=LossWeights())
    """

    def probe(self, passes: Passes, *, rho: float, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        """Nothing to probe."""
        return lambda losses: losses.detach().clamp(min=0)


@dataclass(frozen=True, kw_only=True)
class RandomWeights(Weighting):
    """The weights of another weighting, shuffled within the batch: same distribution, same cost, no information.

    If training with these does as well as with the real ones, curvature was not the cause.

    Attributes:
        of: The weighting whose weights are shuffled.

    Example:
        >>> from deltasam import DeltaSAM
        >>> method = DeltaSAM(rho=0.05, weighting=RandomWeights())  # shuffles those of Eq. 5
    """

    of: Weighting = field(default_factory=FiniteDifference)

    def __post_init__(self) -> None:
        """Checks the weighting."""
        if not isinstance(self.of, Weighting):
            raise TypeError(f"of={self.of!r} must be a Weighting such as FiniteDifference()")

    def probe(self, passes: Passes, *, rho: float, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        """Probes as the other weighting does."""
        inner = self.of.probe(passes, rho=rho, eta=eta, seed=seed)

        def weights(losses: Tensor) -> Tensor:
            generator = seeded_generator(losses.device, seed.child(-1))
            return usable(inner(losses))[torch.randperm(len(losses), generator=generator, device=losses.device)]

        return weights
