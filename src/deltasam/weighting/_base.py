"""What every weighting is: extra passes before the gradient pass, then weights from the losses at w."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deltasam.step.checks import check_number
from deltasam.step.passes import Passes
from deltasam.step.randomness import Seed


@dataclass(frozen=True, kw_only=True)
class Weighting(ABC):
    """Instance weights g for delta-SAM.

    A weighting works in two halves, because the losses at w come for free with the gradient pass: :meth:`probe` makes
    the extra passes *before* the graph at w exists (moving the weights under a live graph would break it) and returns
    the function that turns the losses at w into weights.
    """

    @abstractmethod
    def probe(self, passes: Passes, *, rho: float, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        """Makes the extra passes and returns ``losses at w (N,) -> weights g (N,)``.

        Args:
            passes: The passes of the step.
            rho: Radius of the perturbation, the probes' default radius.
            eta: Floor of the denominator in Eq. 5.
            seed: Seed of the random direction, a new one every step.
        """


def check_radius(radius: float | None) -> None:
    """Raises a ValueError for a radius of probes that is neither a positive number nor None, which stands for rho."""
    if radius is not None:
        check_number("radius", radius, 0, open_low=True)


def usable(weights: Tensor, mean: Tensor | None = None) -> Tensor:
    """The weights if they are finite and not all zero, else uniform ones: then the step is SAM's.

    Args:
        weights: g, (N,).
        mean: Their mean over all processes that decide together; that of these here by default.

    Example:
        >>> usable(torch.tensor([0.0, 0.0])), usable(torch.tensor([1.0, float("nan")]))
        (tensor([1., 1.]), tensor([1., 1.]))
    """
    mean = weights.mean() if mean is None else mean
    good = torch.isfinite(mean) & (mean > 0)
    return torch.where(good, weights, torch.ones_like(weights))
