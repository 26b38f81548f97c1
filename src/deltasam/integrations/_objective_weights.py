"""Objectives with weights of their own, a trained temperature for example: what a Trainer does for the model alone."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from deltasam.objectives.nesting import with_weights


class ZeroAllGradients(TrainerCallback):
    """Clears the gradients of all that the optimizer updates; Trainer clears those of the model."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clears what an earlier training has left."""
        kwargs["optimizer"].zero_grad()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clears what the update has used."""
        kwargs["optimizer"].zero_grad()


def check_objective_weights(
    objective: Any, processes: int, *, capture: bool = False, model: nn.Module | None = None
) -> None:
    """One clear error for weights that would come apart, or stay as they are.

    Args:
        objective: The objective.
        processes: How many train.
        capture: Whether steps are recorded.
        model: The model, whose weights the objective may hold.

    Raises:
        ValueError: The objective has weights, and there are several processes, or steps are recorded.
    """
    module = with_weights(objective, model)
    if module is None or (processes == 1 and not capture):
        return
    own = f"objective={type(module).__name__} has weights of its own, whose gradients"
    if processes > 1:
        why, way_out = f"nothing averages over the {processes} processes", "train in one process"
    else:
        why, way_out = "recorded steps do not hand out", "set capture=False"
    raise ValueError(f"{own} {why}: make them a part of the model, freeze them (requires_grad_(False)), or {way_out}")
