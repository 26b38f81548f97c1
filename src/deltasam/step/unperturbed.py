"""Objectives of which a part stays at w: an adversary on the second of two views, as the paper has it for Mirror-BERT.

While the weights are moved to w + eps, the held part (the first view's embeddings) is computed with the weights put
back to w *by value* and the gradient going to the parameters all the same; one backward then serves both parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deltasam.step.checkpointing import computed_again
from deltasam.step.perturb import Moved


class _AtOrigin(torch.autograd.Function):
    """The value w with the gradient of the parameter that has moved away from it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, origin: Tensor) -> Tensor:
        return origin.view_as(origin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _at_origin(parameter: Tensor, origin: Tensor) -> Tensor:
    value: Tensor = _AtOrigin.apply(parameter, origin)  # type: ignore[no-untyped-call]
    return value


class CallWrapper(nn.Module):
    """Gives ``functional_call`` something to call: any function, with the model's parameters replaced meanwhile."""

    def __init__(self, model: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._function = function

    def forward(self) -> Any:
        """Calls the function."""
        return self._function()


def unperturbed_part(
    objective: Any, model: nn.Module, batch: Any, moved: Moved | None, at_w: Mapping[str, Tensor]
) -> Tensor | None:
    """The part of the outputs that stays at w, or None if the objective holds none of this batch.

    Args:
        objective: One that says that it holds something (``has_unperturbed_part``).
        model: The model, perhaps with its weights moved.
        batch: The batch.
        moved: The move, None at w. At w the part is a constant: a perturbation that does not reach it has no business
            following its gradient.
        at_w: Without a move: weights by name that are not the model's own while a transform runs.
    """
    held = objective.unperturbed
    if moved is None:
        with torch.no_grad():
            return _with(model, at_w, lambda: held(model, batch))
    names = {id(p): name for name, p in model.named_parameters()}
    back = {names[id(p)]: _at_origin(p, w) for p, w in moved.pairs() if id(p) in names}
    with computed_again(lambda compute: _with(model, back, compute)):
        return _with(model, back, lambda: held(model, batch))


def _with(model: nn.Module, values: Mapping[str, Tensor], compute: Callable[[], Tensor | None]) -> Tensor | None:
    """What it computes while these parameters of the model have other values."""
    if not values:  # functional_call goes through all modules, and not only once
        return compute()
    named = {f"model.{name}": value for name, value in values.items()}
    found: Tensor | None = functional_call(CallWrapper(model, compute), named, (), tie_weights=True)
    return found
