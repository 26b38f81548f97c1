"""Objectives with weights of their own, a trained temperature for example: what a Trainer does for the model alone."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback


class ClearedGradients(TrainerCallback):
    """Clears the gradients of all that the optimizer updates; Trainer clears those of the model."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clears what an earlier training has left."""
        kwargs["optimizer"].zero_grad()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clears what the update has used."""
        kwargs["optimizer"].zero_grad()


def has_weights(objective: Any) -> bool:
    """Whether the objective is a module with something to train."""
    return isinstance(objective, nn.Module) and any(p.requires_grad for p in objective.parameters())


def refuse_apart(objective: Any, processes: int) -> None:
    """One clear error for weights that would come apart.

    Raises:
        ValueError: The objective has weights, and there are several processes.
    """
    if processes > 1 and has_weights(objective):
        raise ValueError(
            f"objective={type(objective).__name__} has weights of its own, whose gradients nothing averages over the "
            f"{processes} processes: make them a part of the model, freeze them (requires_grad_(False)), or train in "
            "one process"
        )
