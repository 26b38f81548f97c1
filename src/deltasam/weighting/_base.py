"""The base of all weightings: extra passes before the gradient pass, then weights from the losses at w."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deltasam.step.checks import check_number
from deltasam.step.passes import Passes
from deltasam.step.quantized import require_ordinary
from deltasam.step.radius import Number
from deltasam.step.randomness import Seed


@dataclass(frozen=True, kw_only=True)
class Weighting(ABC):
    """Instance weights g for delta-SAM.

    A weighting has two halves, because the gradient pass computes the losses at w anyway: :meth:`probe` makes the
    extra passes *before* the graph at w exists (moving the weights under a live graph would break it), and returns the
    function that turns the losses at w into weights.
    """

    @abstractmethod
    def probe(self, passes: Passes, *, rho: Number, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        """Makes the extra passes and returns ``losses at w (N,) -> weights g (N,)``.

        Args:
            passes: The passes of the step.
            rho: Radius of the perturbation, the default radius of the probes.
            eta: Floor of the denominator in Eq. 5.
            seed: Seed of the random direction, another one in every step.
        """

    def __call__(self, passes: Passes, *, rho: Number, eta: float, seed: Seed) -> InstanceWeights:
        """The weights of one step, for ``passes.gradient``. The arguments are those of :meth:`probe`.

        Raises:
            ValueError: A quantized weight is to be perturbed: probes cannot move it.
        """
        require_ordinary(passes.params.values(), passes.params)
        return InstanceWeights(self.probe(passes, rho=rho, eta=eta, seed=seed), passes)


class InstanceWeights:
    """The weights of one step; ``passes.gradient`` calls it with the losses at w.

    Attributes:
        values: g, (N,); None before the gradient pass.

    Args:
        rule: Computes the weights from the losses at w.
        passes: The passes of the step.
    """

    def __init__(self, rule: Callable[[Tensor], Tensor], passes: Passes) -> None:
        self.values: Tensor | None = None
        self._rule = rule
        self._passes = passes

    def __call__(self, losses: Tensor) -> Tensor:
        """The weights, scaled to a mean of 1: in half precision the gradient keeps its magnitude."""
        g = self._rule(losses)
        mean = self._passes.ranks.mean(g.mean()) if self._passes.scope == "global" else g.mean()
        self.values = usable(g, mean)
        return self.values / usable(mean, mean)


def check_probes(radius: float | None, *, samples: int = 1, precision: str = "float32") -> None:
    """Raises a ValueError if one of the options that several weightings have is wrong."""
    check_number("samples", samples, 1, whole=True)
    if radius is not None:
        check_number("radius", radius, 0, open_low=True)
    if precision not in ("float32", "ambient"):
        raise ValueError(f"precision={precision!r} must be 'float32' or 'ambient'")


def usable(weights: Tensor, mean: Tensor | None = None) -> Tensor:
    """The weights if they are finite and not all zero, else uniform weights, which make the step SAM.

    Args:
        weights: g, (N,).
        mean: Their mean, over all processes that decide together; that of ``weights`` by default.

    Example:
        >>> usable(torch.tensor([0.0, 0.0])), usable(torch.tensor([1.0, float("nan")]))
        (tensor([1., 1.]), tensor([1., 1.]))
    """
    mean = weights.mean() if mean is None else mean
    good = torch.isfinite(mean) & (mean > 0)
    return torch.where(good, weights, torch.ones_like(weights))
