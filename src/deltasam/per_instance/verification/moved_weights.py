"""Compares a perturbed pass with weights that are really moved: what the gradient at w cannot show.

At w every layout gives the same losses, and values that the model detaches have no gradient. So one group is moved for
real, once per model and kind of input, and its losses are compared with those of the perturbed pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from deltasam._torch import TorchDispatchMode, argument_names, tree_leaves
from deltasam.per_instance.errors import MisreadError, UncoveredError
from deltasam.per_instance.interception.batch_rule import Place
from deltasam.per_instance.interception.slots import ParameterSlots
from deltasam.per_instance.verification.comparison import CheckResult, Scale
from deltasam.per_instance.verification.plain_pass import Run, plain_losses, without_trace
from deltasam.step.float32 import full_float32
from deltasam.step.moving import perturbed as moved
from deltasam.step.norms import global_norm, step_size

Losses = Callable[[Tensor], Tensor]

_MOST_COMPARISONS = 64  # per model; a model that skips layers at random makes thousands of kinds of pass
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-2}
_RISE = 0.1  # of the loss: well above its rounding, and the model still works
_MOVE = 1e-2  # of the weights, at most
_FARTHER = 4.0  # in half precision, times as far: the rise must be above the rounding of the losses
_CLEARLY = 0.7
_REPEATS = 8  # of a pass with random draws: two passes may happen to draw the same
_UNPROVEN = "a layer without a gradient is called with an input that is not laid out like the batch"
_AMPLIFIED = 1e4  # by how much a deep model amplifies the rounding of one operation, at most


def check_perturbed_pass(
    slots: ParameterSlots,
    run: Run,
    losses: Tensor,
    norms: Tensor,
    check: CheckResult,
    scale: Scale | None,
    perturb: Callable[[Tensor], AbstractContextManager[None]],
) -> None:
    """Compares the perturbed losses of one group, whose gradient at w is right, with those at moved weights.

    Only parameters whose gradient was compared move, on both sides. In half precision the losses differ by rounding;
    then this makes sure that the perturbed pass runs, and reads the inputs that the gradient did not prove in the way
    that is closer to the moved weights.
    ``norms`` have the loss scale; ``perturb`` opens the perturbed pass of the engine for the coefficients (G,).

    Raises:
        MisreadError: An input whose layout the gradient did not prove was misread; carries the correction.
        UncoveredError: The perturbed pass does not follow the weights.
    """
    model, params, members = slots.model, slots.compared, check.members
    if not params or check.group < 0 or slots.is_sharded or len(slots.memory.verified) >= _MOST_COMPARISONS:
        return
    norm = norms[check.group]
    norm = norm if scale is None else norm / scale(torch.ones_like(norm))
    radius = _radius(losses[members], float(norm), params)

    def mine(c: Tensor) -> Tensor:
        with torch.enable_grad(), full_float32(losses.device), without_trace(model), perturb(c):
            return run().detach()[members]

    def exact(c: Tensor) -> Tensor:
        weights: list[Any] = list(params.values())
        with full_float32(losses.device), moved(weights, check.gradients, c[check.group], consume=False):
            return plain_losses(model, run).detach()[members]

    c = step_size(radius, norms)
    if check.is_half or _is_half(model, losses):
        mine(c)
        if check.unproven and _are_shared(slots, mine, exact, _FARTHER * c, check.unproven):
            raise MisreadError(_UNPROVEN, shared=check.unproven)
        return
    tolerance = max(_TOLERANCE.get(p.dtype, 1.0) for p in (losses, *params.values()))
    if _agree(mine, exact, c, losses[members], tolerance):
        return
    if check.unproven:
        raise MisreadError(_UNPROVEN, shared=check.unproven)
    raise UncoveredError(
        "the losses of the low-rank engine at perturbed weights differ from those at moved weights: the model reads a "
        "parameter in a way that bypasses the engine, or a rule that you registered (register_rule) is wrong",
        list(params),
    )


def _agree(mine: Losses, exact: Losses, c: Tensor, before: Tensor, tolerance: float) -> bool:
    """Whether two passes with the coefficients ``c`` give the same losses; ``before`` are those at w."""
    true = exact(c)
    rounding = 200 * torch.finfo(true.dtype).eps * (1 + true.norm())
    off = (mine(c) - true).norm()
    if not bool(off > tolerance * (true - before).norm() + rounding):  # a value that is not finite proves nothing
        return True
    # Not the engine's fault: draws that cannot be repeated, rounding that the dtypes do not show, dropout masks that
    # depend on the layout.
    observer = _Observer()
    for _ in range(_REPEATS):
        with observer:
            again = exact(c * (1 + 0.02 * tolerance))
        if bool((again - true).norm() > 0.1 * off):
            return True
        if not observer.draws:
            break
    nothing = torch.zeros_like(c)
    at_w = exact(nothing)
    apart = (mine(nothing) - at_w).norm()
    if not bool(apart > 0.1 * off):
        return False
    # The losses differ at w: a rule is wrong, unless random draws or rounding explain it.
    return observer.draws or not bool(apart > _AMPLIFIED * observer.eps * (1 + at_w.norm()))


def _are_shared(slots: ParameterSlots, mine: Losses, exact: Losses, c: Tensor, places: frozenset[Place]) -> bool:
    """Whether the perturbed losses are clearly closer to those at moved weights if these inputs are read as shared."""
    true = exact(c)
    as_read = (mine(c) - true).norm()
    with slots.memory.read_as_shared(places):
        as_shared = (mine(c) - true).norm()
    return bool(as_shared < _CLEARLY * as_read)


def _is_half(model: nn.Module, losses: Tensor) -> bool:
    """Whether a part of the model rounds so much that two exact ways to the losses differ visibly."""
    halves = (torch.float16, torch.bfloat16)
    if losses.dtype in halves or torch.is_autocast_enabled(losses.device.type):
        return True
    return any(t.dtype in halves for t in (*model.parameters(), *model.buffers()))


def _radius(losses: Tensor, norm: float, params: Mapping[str, Tensor]) -> float:
    """How far to move: far enough for a visible rise of the loss, but not so far that the model breaks."""
    weights = _MOVE * float(global_norm([p.detach() for p in params.values()]))
    rise = _RISE * float(losses.abs().sum()) / norm
    return min((r for r in (weights, rise) if r > 0), default=1e-3)


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes why two exact ways to the same losses may differ: random draws, and rounding."""

    supports_higher_order_operators = True  # flex_attention is one

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False  # a dropout mask depends on the memory layout of its input
        self.eps = 0.0  # the coarsest of the computed tensors; parameters and losses need not show it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operation."""
        found = func(*args, **(kwargs or {}))
        self.draws = self.draws or _draws(func, args, kwargs or {})
        floats = (t.dtype for t in tree_leaves(found) if isinstance(t, Tensor) and t.is_floating_point())
        self.eps = max([self.eps, *(torch.finfo(dtype).eps for dtype in floats)])
        return found


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):  # higher-order operators have none
        return False
    # Attention kernels have the tag with and without dropout.
    names = argument_names(func)
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    given = kwargs.get("dropout_p", args[at] if at < len(args) else 0.0)
    return bool(given > 0)
