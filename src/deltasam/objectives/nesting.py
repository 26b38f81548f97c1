"""Nested objectives: the layers of regularisers around an objective, and the one that has trainable weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from deltasam.objectives.regularisers import Losses


def layers(objective: Any) -> Iterator[Any]:
    """The objective and all objectives that it wraps, from the outermost to the innermost."""
    yield objective
    while hasattr(objective, "objective") or isinstance(objective, Losses):
        objective = objective.function if isinstance(objective, Losses) else objective.objective
        yield objective


def innermost(objective: Any) -> Any:
    """The objective inside all regularisers."""
    return [*layers(objective)][-1]


def with_weights(objective: Any, model: nn.Module | None = None) -> nn.Module | None:
    """The first layer of an objective that is a module with trainable parameters, None if there is none.

    Args:
        objective: The objective.
        model: A model whose parameters do not count: an objective may contain the model.
    """
    found = [
        (each, [p for p in each.parameters() if p.requires_grad])
        for each in layers(objective)
        if isinstance(each, nn.Module)
    ]
    known = {id(p) for p in model.parameters()} if model is not None and any(own for _, own in found) else set()
    return next((each for each, own in found if any(id(p) not in known for p in own)), None)
