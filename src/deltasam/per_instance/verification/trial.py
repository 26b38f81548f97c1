"""Passes that are made for a comparison only, once per model and kind of input: what the gradient at w cannot show.

At w every reading of the inputs gives the same losses, and what the model detaches has no gradient. So one group is
also moved for real and its loss compared, and whether instances mix is tried out on the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deltasam._torch import tree_flatten, tree_unflatten, version_of
from deltasam.per_instance.interception.slots import eager
from deltasam.per_instance.verification.errors import ModelError
from deltasam.per_instance.verification.verify import Checked
from deltasam.per_instance.verification.watch import Watch
from deltasam.step.buffers import Buffers
from deltasam.step.checks import is_out_of_memory
from deltasam.step.float32 import full_float32
from deltasam.step.gradients import graph_of
from deltasam.step.perturb import global_norm, step_size
from deltasam.step.perturb import perturbed as moved

Run = Callable[[], Tensor]
Change = Callable[[Tensor], Tensor]

MOST_TRIALS = 64  # of one model; where layers are left out at random, there are thousands of kinds of pass

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-2}
_RISE = 0.1  # of the loss: well above its rounding, and the model is still itself
_MOVE = 1e-2  # of the weights, at most
_AMPLIFIED = 1e4  # what a deep model makes of the rounding of one operation, at most


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """For a pass that plain training does not make: afterwards the buffers are what they were; nothing is compiled.

    A pass that starts with rewinding the step takes the model's own buffers, whatever was lent to it.
    """
    kept = [(b, _version(b), b.detach().clone()) for b in model.buffers()]
    try:
        with Buffers(model).rewound(), eager():
            yield
    finally:
        with torch.no_grad():
            for buffer, version, value in kept:
                if _version(buffer) != version:
                    buffer.copy_(value)


def _version(buffer: Tensor) -> int:
    """Changes with every write; a graph that has saved the buffer allows none, so none is made without need."""
    return 0 if buffer.is_inference() else version_of(buffer)


def plainly(model: nn.Module, run: Run) -> Tensor:
    """The losses, with their graph, of a pass without proxies.

    Raises:
        ModelError: The pass failed, which is not for the engine to judge.
    """
    try:
        with torch.enable_grad(), without_trace(model):
            return run()
    except Exception as error:
        raise ModelError(error) from error


def reached_from(losses: Tensor) -> set[int]:
    """The parameters (by ``id``) that the graph of the losses leads to."""
    return {id(node.variable) for node in graph_of(losses) if hasattr(node, "variable")}


def is_followed(
    model: nn.Module,
    run: Run,
    losses: Tensor,
    norms: Tensor,
    params: Mapping[str, Tensor],
    checked: Checked,
    scale: float,
    perturb: Callable[[Tensor], AbstractContextManager[None]],
) -> bool:
    """Whether the perturbed pass gives the losses of one group that the model has with weights that are really moved.

    In half precision weights cannot be moved exactly; there it is only seen whether the perturbed pass works at all.

    Args:
        model: The model.
        run: Makes one pass.
        losses: At w, (N,).
        norms: Of the gradients, (G,), with the loss scale.
        params: The perturbed parameters.
        checked: The group, and its gradient.
        scale: The loss scale.
        perturb: The engine's perturbed pass for the coefficients (G,).
    """
    before = losses[checked.members]
    c = step_size(_radius(before, float(norms[checked.group]) / scale, params), norms)

    def mine(c: Tensor) -> Tensor:
        with full_float32(losses.device), without_trace(model), perturb(c):
            return run().detach()[checked.members]

    def exact(c: Tensor) -> Tensor:
        weights: list[Any] = list(params.values())
        with full_float32(losses.device), moved(weights, checked.gradients, c[checked.group], consume=False):
            return plainly(model, run).detach()[checked.members]

    if checked.halves or _has_halves(model, losses):
        mine(c)
        return True
    tolerance = max(_TOLERANCE.get(p.dtype, 1.0) for p in (losses, *params.values()))
    true = exact(c)
    rounding = 200 * torch.finfo(true.dtype).eps * (1 + true.norm())
    off = (mine(c) - true).norm()
    if not bool(off > tolerance * (true - before).norm() + rounding):  # not finite says nothing
        return True
    # Draws that cannot be repeated, rounding that the dtypes do not show, dropout masks by another layout: no fault
    if bool((exact(c * (1 + 0.02 * tolerance)) - true).norm() > 0.1 * off):
        return True
    nothing, watch = torch.zeros_like(c), Watch()
    with watch:
        at_w = exact(nothing)
    apart = (mine(nothing) - at_w).norm()
    if not bool(apart > 0.1 * off):
        return False
    # Where neither explains losses at w that are not the model's, a rule is wrong.
    return watch.draws or not bool(apart > _AMPLIFIED * watch.eps * (1 + at_w.norm()))


def _has_halves(model: nn.Module, losses: Tensor) -> bool:
    """Whether a part of the model rounds so much that two ways to the same losses differ visibly."""
    halves = (torch.float16, torch.bfloat16)
    if losses.dtype in halves or torch.is_autocast_enabled(losses.device.type):
        return True
    return any(t.dtype in halves for t in (*model.parameters(), *model.buffers()))


def _radius(losses: Tensor, norm: float, params: Mapping[str, Tensor]) -> float:
    """How far to go: for a visible rise of the loss, but not out of the model."""
    weights = _MOVE * float(global_norm([p.detach() for p in params.values()]))
    rise = _RISE * float(losses.abs().sum()) / norm
    return min((r for r in (weights, rise) if r > 0), default=1e-3)


def mixes(model: nn.Module, run: Run, size: int, members: slice) -> bool | None:
    """Whether the losses of some instances change with the other instances; None if that cannot be tried.

    The others are replaced by one of these in what the model is called with: the first dimension one instance after
    the other or the batch several times over, or the second. If any of these leaves the losses alone, they depend on
    no other instance. The draws are the same in every pass.

    Args:
        model: The model, without proxies.
        run: Makes one pass.
        size: N.
        members: Whose losses.
    """

    def losses() -> Tensor:
        with torch.enable_grad(), without_trace(model):
            return run().detach()[members]

    before = plainly(model, run).detach()[members]
    precision = 1e-3 if before.dtype is torch.float64 else 1.0
    allowed = precision * 1e-3 * before.abs().max()
    tried = False
    for change in (_first(size, members, "flat"), _first(size, members, "tiled"), _second(size, members)):
        after = _losses_with(model, change, losses)
        if after is not None:
            tried = True
            if bool((after - before).abs().max() <= allowed):
                return False
    return True if tried else None


def _losses_with(model: nn.Module, change: Change, losses: Run) -> Tensor | None:
    """The losses if the model sees other inputs; None if they say nothing, or the model cannot do with them."""
    try:
        with _changed(model, change) as calls:
            found = losses()
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        return None
    return found if calls and all(calls) else None


@contextmanager
def _changed(model: nn.Module, change: Change) -> Iterator[list[bool]]:
    """The model sees other tensors than it is called with; yields whether the first tensor of each call is another.

    One whose values are the same says nothing, and what comes later may be a mask that hardly matters.
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


def _first(size: int, members: slice, order: str) -> Change:
    """Rows of other instances in the first dimension become those of the first member."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or tensor.shape[0] % size or not tensor.shape[0]:
            return tensor
        rows = torch.arange(tensor.shape[0], device=tensor.device)
        times = tensor.shape[0] // size
        owner = rows // times if order == "flat" else rows % size
        step = times if order == "flat" else 1
        other = (owner < members.start) | (owner >= members.stop)
        return tensor.index_select(0, torch.where(other, rows + (members.start - owner) * step, rows))

    return change


def _second(size: int, members: slice) -> Change:
    """The same for a batch that has the instances in the second dimension."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != size:
            return tensor
        columns = torch.arange(size, device=tensor.device)
        other = (columns < members.start) | (columns >= members.stop)
        return tensor.index_select(1, torch.where(other, torch.full_like(columns, members.start), columns))

    return change
