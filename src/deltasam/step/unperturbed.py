"""Objectives of which a part stays at w, such as the first of two views in the paper's Mirror-BERT.

While the weights are moved to w + eps, the unperturbed part (the embeddings of the first view) is computed with the
*values* of w, and its gradient still goes to the parameters. One backward then serves both parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deltasam._torch import recomputed_by
from deltasam.step.moving import Moved


class _AtOrigin(torch.autograd.Function):
    """The value w with the gradient of the parameter that has moved away from it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, origin: Tensor) -> Tensor:
        return origin.view_as(origin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class CallWrapper(nn.Module):
    """A module that calls any function, so that ``functional_call`` can replace the model's parameters in the call."""

    def __init__(self, model: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._function = function

    def forward(self) -> Any:
        """Calls the function."""
        return self._function()


def unperturbed_part(
    objective: Any, model: nn.Module, batch: Any, moved: Moved | None, weights: Mapping[str, Tensor]
) -> Tensor | None:
    """The part of the outputs that stays at w, or None if the objective has none for this batch.

    Args:
        objective: An objective with ``has_unperturbed_part``.
        model: The model, perhaps with its weights moved.
        batch: The batch.
        moved: The move, None at w.
        weights: Without a move: the values at w by name, if a transform calls the model with other weights.
    """
    unperturbed = objective.unperturbed
    if moved is None:  # a constant: the perturbation does not reach this part, so it must not follow its gradient
        with torch.no_grad():
            return _with(model, weights, lambda: unperturbed(model, batch))
    names = {id(p): name for name, p in model.named_parameters()}
    at_origin: Any = _AtOrigin.apply
    back = {names[id(p)]: at_origin(p, w) for p, w in moved.pairs() if id(p) in names}
    with recomputed_by(lambda compute: _with(model, back, compute)):
        return _with(model, back, lambda: unperturbed(model, batch))


def unperturbed_without(
    objective: Any, model: nn.Module, batch: Any, without: Callable[[], AbstractContextManager[None]]
) -> Tensor | None:
    """The same if the perturbation is not in the weights: ``without()`` is a context that switches it off."""

    def run(compute: Callable[[], Tensor | None]) -> Tensor | None:
        with without():
            return compute()

    with recomputed_by(run):
        return run(lambda: objective.unperturbed(model, batch))


def _with(model: nn.Module, values: Mapping[str, Tensor], compute: Callable[[], Tensor | None]) -> Tensor | None:
    """Calls the function while these parameters of the model have other values."""
    if not values:  # functional_call walks through all modules, more than once
        return compute()
    named = {f"model.{name}": value for name, value in values.items()}
    found: Tensor | None = functional_call(CallWrapper(model, compute), named, (), tie_weights=True)
    return found
