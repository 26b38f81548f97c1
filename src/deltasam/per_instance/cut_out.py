"""A group that the loop cuts out of its batch: whether it has the losses that it has in the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deltasam.per_instance.errors import COMMON, is_for_the_caller
from deltasam.per_instance.interception.memory import warn_once
from deltasam.step.batches import one_more
from deltasam.step.float32 import rounded
from deltasam.step.passes import Passes

_NOT_ROWS = (
    "Cut out of its batch, an instance has another loss, or none, so the loop over instances passes the whole batch "
    "through the model for it (slow): the batch has a tensor of which the first dimension is the number of instances "
    "by chance, or which belongs to other instances. Give what all instances share a first dimension of 1 with "
    "unsqueeze(0), and what belongs to the instances the form of a tensor with one row for each"
)
#: Relative differences that rounding explains: kernels depend on the number of rows.
_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-3}
_TF32, _HALF = 1e-2, 0.1


class CutOut:
    """The objective of a group that was cut out of its batch: of the whole batch, if the cut changes the losses at w.

    A cut takes every tensor with N rows apart. By chance these need not be the instances: class weights of N classes,
    a mask of N tokens, N images of which one text has two. A cut also leaves a list of numbers as it is.

    The first call is at w. Nothing random is drawn, so the losses of the group alone are those in the batch.
    """

    def __init__(self, objective: Any, part: Passes, members: Tensor, losses: Tensor) -> None:
        self._objective, self._part, self._members = objective, part, members
        self._at_w: Tensor | None = losses  # of the whole batch
        self._is_whole = False

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The losses of the group, from the cut batch that is passed if they are right."""
        if self._at_w is not None:
            whole, self._at_w = self._at_w, None
            losses = self._alone(model, batch)
            if losses is not None and _are_equal(losses.detach(), whole, self._members, model):
                return losses
            self._is_whole = True
            warn_once(self._part.inner, _NOT_ROWS)
        if not self._is_whole:
            return self._objective(model, batch)  # type: ignore[no-any-return]
        found: Tensor = self._part.objective(model, one_more(self._part.batches[0]))
        return found[self._members]

    def _alone(self, model: nn.Module, batch: Any) -> Tensor | None:
        """The losses of the group alone; None if it cannot pass through the model, which the whole batch can."""
        try:
            return self._objective(model, batch)  # type: ignore[no-any-return]
        except COMMON as error:
            if is_for_the_caller(error):
                raise
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)


def _are_equal(losses: Tensor, whole: Tensor, members: Tensor, model: nn.Module) -> bool:
    """Whether losses are those of the whole batch, up to rounding."""
    precisions = {losses.dtype, *(p.dtype for p in model.parameters() if p.is_floating_point())}
    if torch.is_autocast_enabled(losses.device.type):
        precisions.add(torch.get_autocast_dtype(losses.device.type))
    tolerance = max(_ROUNDING.get(dtype, _HALF) for dtype in precisions)
    if torch.float32 in precisions and rounded(losses.device):
        tolerance = max(tolerance, _TF32)
    if losses.shape != members.shape:
        return False
    floor = tolerance * whole.abs().nanmedian()
    off = (losses - whole[members]).abs()
    return not bool((off > (tolerance * whole[members].abs()).maximum(floor)).any())  # what is not finite is equal
