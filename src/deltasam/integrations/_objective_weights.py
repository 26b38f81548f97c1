"""Objectives with trainable weights, such as a temperature: Trainer handles the gradients of the model only."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from deltasam.objectives.nesting import with_weights


class ZeroAllGradients(TrainerCallback):
    """Clears the gradients of all parameters of the optimizer; Trainer clears those of the model."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clears what an earlier training left."""
        kwargs["optimizer"].zero_grad()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clears the gradients of the last update."""
        kwargs["optimizer"].zero_grad()


def check_objective_weights(
    objective: Any, processes: int, *, capture: bool = False, model: nn.Module | None = None
) -> None:
    """Raises an error if the weights of an objective would diverge between processes, or never be updated.

    Args:
        objective: The objective.
        processes: Number of processes of the training.
        capture: Whether steps are captured.
        model: The model; its parameters are not weights of the objective.

    Raises:
        ValueError: The objective has trainable weights, and there are several processes or captured steps.
    """
    module = with_weights(objective, model)
    if module is None or (processes == 1 and not capture):
        return
    if processes > 1:
        why, remedy = f"are not averaged over the {processes} processes", "train in one process"
    else:
        why, remedy = "are not returned by captured steps", "set capture=False"
    raise ValueError(
        f"objective={type(module).__name__} has trainable weights, whose gradients {why}: make them part of the "
        f"model, freeze them with requires_grad_(False), or {remedy}"
    )
