"""Base classes of objectives that wrap an objective: delegation, and losses that compare several outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from deltasam.objectives._base import Objective, load_objective


@dataclass(frozen=True)
class Wrapper(Objective):
    """An objective made from another one; it delegates everything that it does not change.

    Args:
        objective: The wrapped objective, which may be a wrapper, too.
    """

    cost: ClassVar[str] = ""  # forward/backward passes of a step of plain training, for `deltasam list regularisers`
    objective: Objective

    def __post_init__(self) -> None:
        """Checks the wrapped objective."""
        if not isinstance(self.objective, Objective):
            raise TypeError(
                f"{type(self).__name__}(objective={self.objective!r}): must be an Objective, whose outputs can be "
                "compared; for example Classification(), or a subclass of deltasam.Objective with forward, losses and "
                "divergence"
            )

    @property
    def separable(self) -> bool:  # type: ignore[override]  # a class variable of the base, here the wrapped one's
        """Whether the loss of an instance depends on that instance alone."""
        return self.objective.separable

    @property
    def directional(self) -> bool:  # type: ignore[override]
        """Whether the divergence is the mean of two directed ones."""
        return self.objective.directional

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """Outputs of the wrapped objective."""
        return self.objective.forward(model, batch)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        """Losses of the wrapped objective."""
        return self.objective.losses(outputs, batch)

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        """Divergence of the wrapped objective."""
        return self.objective.divergence(first, second, batch)

    def directed(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        """Directed divergence of the wrapped objective."""
        return self.objective.directed(first, second, batch)

    def items(self, batch: Any) -> Tensor | None:
        """The divisor of the wrapped objective's mean."""
        return self.objective.items(batch)

    def check_parts(self, batches: Sequence[Any]) -> None:
        """Calls ``check_parts`` of the wrapped objective."""
        self.objective.check_parts(batches)

    def prepare(self, model: nn.Module) -> None:
        """Prepares the wrapped objective for a step."""
        self.objective.prepare(model)

    def state_dict(self, **place: Any) -> dict[str, Any]:
        """State of the wrapped objective, under ``objective``, and of this one; empty if neither has any.

        The weights of a wrapper that is also a module are under ``module``.

        Args:
            **place: Arguments of a module that contains this one; the result is then only the weights.
        """
        if place:
            return _weights(self, **place)
        parts = {"objective": self.objective.state_dict(), "module": _weights(self)}
        return {**{name: part for name, part in parts.items() if part}, **self._own_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned."""
        own = {key: value for key, value in state.items() if key != "objective"}
        load_objective(self.objective, state.get("objective", {}))
        this: Any = self  # may also be a module
        if isinstance(this, nn.Module) and "module" in own:
            nn.Module.load_state_dict(this, own.pop("module"))
        self._load_own_state(own)

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        Objective.load_state_dict(self, state)


def _weights(objective: Any, **place: Any) -> dict[str, Any]:
    return dict(nn.Module.state_dict(objective, **place)) if isinstance(objective, nn.Module) else {}


@dataclass(frozen=True)
class Consistency(Wrapper):
    """A wrapper whose loss compares several outputs of the model for the same batch, its views.

    A subclass defines the views and how to combine them into one loss per instance. For a wrapper around this one the
    outputs are the stacked views, ``(views, N, ...)``, and the divergence is the mean over the views.
    """

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Losses of the instances, shape ``(N,)``; like ``losses(forward(...))`` but without the stacked copy."""
        return self.combine(self.views(model, batch), batch)

    @abstractmethod
    def views(self, model: nn.Module, batch: Any) -> Sequence[Tensor]:
        """The outputs to compare, each as :meth:`forward` of the wrapped objective returns them."""

    @abstractmethod
    def combine(self, views: Sequence[Tensor], batch: Any) -> Tensor:
        """Losses of the instances from the views, shape ``(N,)``."""

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """The views, stacked."""
        return torch.stack(tuple(self.views(model, batch)))

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        """Losses of the instances from the stacked views."""
        return self.combine(outputs.unbind(0), batch)

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        """Mean over the views of the wrapped objective's divergence."""
        pairs = zip(first.unbind(0), second.unbind(0), strict=True)
        return torch.stack([self.objective.divergence(a, b, batch) for a, b in pairs]).mean(0)

    def directed(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        """Mean over the views of the wrapped objective's directed divergence."""
        pairs = zip(first.unbind(0), second.unbind(0), strict=True)
        return torch.stack([self.objective.directed(a, b, batch) for a, b in pairs]).mean(0)

    def both_directions(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        r""":math:`KL(p_1\|p_2) + KL(p_2\|p_1)`, twice the divergence.

        If the divergence has no direction (squared differences), the divergence itself, as in SMART for regression.
        """
        factor = 2.0 if self.objective.directional else 1.0
        return factor * self.objective.divergence(first, second, batch)


def check_choice(owner: str, name: str, value: Any, choices: Any) -> None:
    """Raises a ValueError that names the argument, its value and the choices."""
    if value not in get_args(choices):
        raise ValueError(f"{owner}({name}={value!r}): must be one of {list(get_args(choices))}")


def check_positive(owner: str, name: str, value: Any, *, zero: bool = True, whole: bool = False) -> None:
    """Raises a ValueError that names the argument and its value, unless that is a finite number of at least 0.

    Args:
        owner: The class.
        name: The argument.
        value: Its value.
        zero: Whether zero is allowed.
        whole: Whether it must be an integer.
    """
    number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not number or not (value >= 0 if zero else value > 0) or value == float("inf"):
        kind = "whole number" if whole else "number"
        raise ValueError(f"{owner}({name}={value!r}): must be a {kind} {'at least' if zero else 'greater than'} 0")
