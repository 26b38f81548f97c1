"""What an error of a pass with proxies means: the instances mix, the model is not covered, or the model is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from deltasam._torch import tree_flatten, tree_unflatten
from deltasam.per_instance.errors import (
    InstancesMixedError,
    MisreadError,
    ModelError,
    NoRuleError,
    RuleError,
    SuspectedMixError,
    UncoveredError,
    first_line,
)
from deltasam.per_instance.interception.slots import ParameterSlots
from deltasam.per_instance.verification.comparison import describe
from deltasam.per_instance.verification.plain_pass import Run, plain_losses, without_trace
from deltasam.step.checks import is_out_of_memory

Change = Callable[[Tensor], Tensor]
How = Literal["adjacent", "tiled", "second"]

NOT_FOUND = (
    "the low-rank engine could not find the instances: the first dimension of a layer's input must be the batch, with "
    "one row or k adjacent rows per instance"
)


def diagnose(slots: ParameterSlots, run: Run, error: Exception, why: MisreadError | None) -> Exception:
    """The exception to raise, found by passes without proxies: if those fail, too, the error is the model's.

    A model that inspects its parameters, or that has its instances in another dimension than the first, can fail with
    any error; the loop covers it. ``why`` is the reason for an earlier repetition of the pass.
    """
    if isinstance(error, NoRuleError):
        message = describe(slots.model, error.parameters, f"an operation ({error.operation})")
        return UncoveredError(message, error.parameters)
    if isinstance(error, SuspectedMixError):
        if _mixes(slots.model, run, error.size, error.members) is not False:
            return InstancesMixedError(
                "the loss of one instance depends on the other instances of the batch (in-batch negatives, statistics "
                "over the batch), so a perturbation per instance is not defined; use SAM or DeltaSAM"
            )
        message = NOT_FOUND
    else:
        try:
            plain_losses(slots.model, run)
        except ModelError as own:
            return own.error
        message = first_line(error)
        if not isinstance(error, RuleError):
            message = f"the low-rank engine fails on this model ({type(error).__name__}: {message})"
    return UncoveredError(message if why is None else f"{why}; {message}", list(slots.params))


def _mixes(model: nn.Module, run: Run, size: int, members: slice) -> bool | None:
    """Whether the losses of ``members`` change with the other instances; None if that cannot be tried.

    The inputs of the other instances are replaced by those of the first member. The instances are searched in three
    ways: as k adjacent rows, in the batch repeated k times, and in the second dimension. If one replacement leaves the
    losses unchanged, they depend on no other instance. All passes draw the same random numbers.
    """

    def losses() -> Tensor:
        with torch.enable_grad(), without_trace(model):
            return run().detach()[members]

    before = plain_losses(model, run).detach()[members]
    precision = 1e-3 if before.dtype is torch.float64 else 1.0
    allowed = precision * 1e-3 * before.abs().max()
    tried = False
    for how in get_args(How):
        after = _losses_with(model, partial(_replaced, how=how, size=size, members=members), losses)
        if after is not None:
            tried = True
            if bool((after - before).abs().max() <= allowed):
                return False
    return True if tried else None


def _losses_with(model: nn.Module, change: Change, losses: Run) -> Tensor | None:
    """The losses for changed inputs; None if the inputs are the same, or the model rejects them."""
    try:
        with _changed_inputs(model, change) as calls:
            found = losses()
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        return None
    return found if calls and all(calls) else None


@contextmanager
def _changed_inputs(model: nn.Module, change: Change) -> Iterator[list[bool]]:
    """Changes the tensors that the model is called with; yields for each call whether its first tensor changed.

    The first tensor counts, because later ones may be masks that hardly matter.
    """
    calls: list[bool] = []

    def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        others = {k: change(leaves[k]) for k in tensors}
        calls.append(bool(tensors) and not torch.equal(others[tensors[0]], leaves[tensors[0]]))
        return tree_unflatten([others.get(k, leaf) for k, leaf in enumerate(leaves)], spec)

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def _replaced(tensor: Tensor, how: How, size: int, members: slice) -> Tensor:
    """The tensor with all other instances replaced by the first member; the tensor itself if it has no instances."""
    fits = tensor.ndim > 1 and tensor.shape[1] == size
    if how != "second":
        fits = tensor.ndim > 0 and tensor.shape[0] > 0 and tensor.shape[0] % size == 0
    if not fits:
        return tensor
    index = torch.arange(size, device=tensor.device)
    other = (index < members.start) | (index >= members.stop)
    index = torch.where(other, torch.full_like(index, members.start), index)
    if how == "second":
        return tensor.index_select(1, index)
    if how == "adjacent":
        return torch.unflatten(tensor, 0, (size, -1)).index_select(0, index).flatten(0, 1)
    return torch.unflatten(tensor, 0, (-1, size)).index_select(1, index).flatten(0, 1)
