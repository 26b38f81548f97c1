"""Base classes of objectives that wrap an objective or a callable, and of losses that compare several outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
        if not isinstance(self.objective, Objective):
            raise TypeError(
                f"{type(self).__name__}(objective={self.objective!r}): must be an Objective, whose outputs can be "
                "compared; for example Classification(), or a subclass of deltasam.Objective with forward, losses and "
                "divergence"
            )

    @property
    def separable(self) -> bool:  # type: ignore[override]  # a class variable of the base, here the wrapped one's
        return self.objective.separable

    @property
    def mixing(self) -> str:  # type: ignore[override]
        return self.objective.mixing

    @property
    def directional(self) -> bool:  # type: ignore[override]
        return self.objective.directional

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return self.objective.forward(model, batch)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.objective.losses(outputs, batch)

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        return self.objective.divergence(first, second, batch)

    def directed(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        return self.objective.directed(first, second, batch)

    def items(self, batch: Any) -> Tensor | None:
        return self.objective.items(batch)

    def check_parts(self, batches: Sequence[Any]) -> None:
        self.objective.check_parts(batches)

    def prepare(self, model: nn.Module) -> None:
        self.objective.prepare(model)

    def prepare_batch(self, model: nn.Module, batch: Any) -> Any:
        return self.objective.prepare_batch(model, batch)

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
        return torch.stack(tuple(self.views(model, batch)))

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.combine(outputs.unbind(0), batch)

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        pairs = zip(first.unbind(0), second.unbind(0), strict=True)
        return torch.stack([self.objective.divergence(a, b, batch) for a, b in pairs]).mean(0)

    def directed(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        pairs = zip(first.unbind(0), second.unbind(0), strict=True)
        return torch.stack([self.objective.directed(a, b, batch) for a, b in pairs]).mean(0)

    def both_directions(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        r""":math:`KL(p_1\|p_2) + KL(p_2\|p_1)`, twice the divergence.

        If the divergence has no direction (squared differences), the divergence itself, as in SMART for regression.
        """
        factor = 2.0 if self.objective.directional else 1.0
        return factor * self.objective.divergence(first, second, batch)


@dataclass(frozen=True)
class Losses(Objective):
    """Any callable ``function(model, batch) -> (N,)`` as an objective without a divergence: its outputs are losses.

    What the methods look for in a callable (``items``, ``separable``) is taken from it.
    """

    function: Callable[[nn.Module, Any], Tensor]

    @property
    def separable(self) -> bool:  # type: ignore[override]
        return getattr(self.function, "separable", Objective.separable)

    @property
    def mixing(self) -> str:  # type: ignore[override]
        return getattr(self.function, "mixing", Objective.mixing)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return self.function(model, batch)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs

    def items(self, batch: Any) -> Tensor | None:
        own = getattr(self.function, "items", None)
        return None if own is None else own(batch)

    def check_parts(self, batches: Sequence[Any]) -> None:
        getattr(self.function, "check_parts", lambda batches: None)(batches)

    def prepare(self, model: nn.Module) -> None:
        getattr(self.function, "prepare", lambda model: None)(model)

    def prepare_batch(self, model: nn.Module, batch: Any) -> Any:
        own = getattr(self.function, "prepare_batch", None)
        return batch if own is None else own(model, batch)

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        raise TypeError(
            f"{self.function!r} returns losses, not outputs that can be compared: wrap an Objective instead, "
            "for example Classification()"
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(getattr(self.function, "state_dict", dict)())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self.function, "load_state_dict"):
            load_objective(self.function, state)
        else:
            super().load_state_dict(state)


def as_objective(value: Any) -> Objective:
    """An objective itself, any other callable as :class:`Losses`."""
    wrapped: Objective = Losses(value) if callable(value) and not isinstance(value, Objective) else value
    return wrapped
