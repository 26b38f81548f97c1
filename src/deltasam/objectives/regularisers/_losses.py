"""Wraps any callable that returns losses as an objective, for regularisers that only change the model's inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deltasam.objectives._base import Objective, load_objective


@dataclass(frozen=True)
class Losses(Objective):
    """An objective whose outputs are the losses themselves; it has no divergence.

    Args:
        function: ``function(model, batch) -> (N,)``.
    """

    function: Callable[[nn.Module, Any], Tensor]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """The losses."""
        return self.function(model, batch)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        """The losses again."""
        return outputs

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        """Not known from losses alone."""
        raise TypeError(
            f"{self.function!r} returns losses, not outputs that can be compared: wrap an Objective instead, "
            "for example Classification()"
        )

    def state_dict(self) -> dict[str, Any]:
        """State of the function, if it has a ``state_dict``."""
        return dict(getattr(self.function, "state_dict", dict)())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned."""
        if hasattr(self.function, "load_state_dict"):
            load_objective(self.function, state)
        else:
            super().load_state_dict(state)


def as_objective(value: Any) -> Objective:
    """An objective itself, any other callable as :class:`Losses`."""
    wrapped: Objective = Losses(value) if callable(value) and not isinstance(value, Objective) else value
    return wrapped
