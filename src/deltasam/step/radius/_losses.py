"""Radii in units of the loss: how much a perturbation may raise it, to first order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from deltasam.step.checks import check_number
from deltasam.step.radius._base import Climb, Number, Radius
from deltasam.step.radius._given import as_radius, check_radius

Self = TypeVar("Self", bound="_OfLoss")


class _OfLoss(Radius):
    """A rise of the loss over the norm of the gradient, at most a bound. The first field is the rise."""

    needs_gradient = True
    at_most: float | Radius | None
    _amount: ClassVar[str]  # the name of the first field

    def __post_init__(self) -> None:
        """Checks the values."""
        check_number(self._amount, getattr(self, self._amount), 0)
        if self.at_most is not None:
            check_radius("at_most", self.at_most)

    @abstractmethod
    def _rise(self, climb: Climb) -> Number: ...

    def radius_of(self, climb: Climb) -> Number:
        """The rise over the norm of the gradient, at most the bound."""
        rho = self._rise(climb) / climb.slope
        return rho if self.at_most is None else _at_most(rho, as_radius(self.at_most).radius_of(climb))

    def is_zero(self) -> bool:
        """Whether the rise or the bound is zero."""
        parts = (getattr(self, self._amount), self.at_most)
        return any(as_radius(part).is_zero() for part in parts if part is not None)

    def scaled(self: Self, factor: Number) -> Self:
        """Scales the rise and the bound."""
        bound = None if self.at_most is None else self.at_most * factor
        return self._with(**{self._amount: getattr(self, self._amount) * factor, "at_most": bound})


@dataclass(frozen=True)
class LossBudget(_OfLoss):
    r"""The radius at which the loss rises by sigma, to first order.

    .. math:: \rho = \min(\sigma / \lVert \nabla l(w) \rVert_2,\ \rho_{\max})

    The unit is that of the loss, so one value serves models and parametrisations whose gradients differ in size. A
    method with a perturbation per instance gives every instance its own radius. An instance that is fitted has hardly
    any gradient; ``at_most`` bounds its radius.

    Cost: none; ``at_most=Relative(...)`` reads the weights once.

    Attributes:
        sigma: The rise of the loss.
        at_most: The largest radius: a number, a rule such as ``Relative(1e-3)``, or None.

    References:
        LE-SAM, arXiv 2605.10183 (ICML 2026), fixes the budget in this way.

    Example:
        >>> import torch
        >>> from deltasam import SAM
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1)
        >>> step = SAM(rho=LossBudget(0.1)).backward(model, torch.ones(4, 2), objective)
        >>> round(float(step.sharpness), 5)  # the loss is linear here, so the first order is exact
        0.1
    """

    sigma: float = 0.05
    at_most: float | Radius | None = None
    _amount = "sigma"

    def _rise(self, climb: Climb) -> Number:
        return self.sigma


@dataclass(frozen=True)
class LossShare(_OfLoss):
    r"""The radius at which the loss rises by a share of itself, to first order.

    .. math:: \rho = \min(\kappa\, l(w) / \lVert \nabla l(w) \rVert_2,\ \rho_{\max})

    As :class:`LossBudget` with a budget in proportion to the loss. Where the loss is fitted, loss and gradient vanish
    together, so it hardly needs a bound. With a perturbation per instance every instance has its own radius. Losses
    below zero count as zero.

    Cost: none.

    Attributes:
        share: :math:`\kappa`, the rise of the loss relative to the loss.
        at_most: The largest radius: a number, a rule such as ``Relative(1e-3)``, or None.

    Example:
        >>> import torch
        >>> from deltasam import SAM
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1).exp()
        >>> step = SAM(rho=LossShare(0.01)).backward(model, torch.ones(4, 2), objective)
        >>> round(float(step.sharpness / step.loss), 3)
        0.01
    """

    share: float = 0.05
    at_most: float | Radius | None = None
    _amount = "share"

    def _rise(self, climb: Climb) -> Number:
        assert climb.loss is not None
        return self.share * climb.loss().to(climb.norm).clamp_min(0)


def _at_most(rho: torch.Tensor, bound: Number) -> torch.Tensor:
    """The smaller one in magnitude: a scaled rule may be negative."""
    limit: Any = abs(bound)
    return torch.where(rho.abs() > limit, torch.sign(rho) * limit, rho)
