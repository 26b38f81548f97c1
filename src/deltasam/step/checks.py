"""Checks of the arguments of a step and of the losses that an objective returns: one clear error for each mistake."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deltasam._torch import in_function_transform
from deltasam.step.batches import tensors, versions


def shown(value: object) -> str:
    """The ``repr`` of a value for an error message: on one line, and short."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_number(
    name: str,
    value: float,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    whole: bool = False,
) -> None:
    """Raises a ValueError if a hyperparameter is not in [low, high]; open ends are excluded."""
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    is_at_open_end = (open_low and value == low) or (open_high and value == high)
    if not number or not low <= value <= high or is_at_open_end:
        ends = "(" if open_low or math.isinf(low) else "[", ")" if open_high or math.isinf(high) else "]"
        bounds = f"{ends[0]}{low:g}, {high:g}{ends[1]}"
        kind = "whole number" if whole else "number"
        foreign = ", as a Python number: pass its .item()" if hasattr(value, "item") else ""
        raise ValueError(f"{name}={shown(value)} must be a {kind} in {bounds}{foreign}")


def check_step(model: Any, objective: Any) -> None:
    """Raises a TypeError if the model is not a module, or the objective cannot be called with a model and a batch."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={shown(model)} must be a torch.nn.Module; the order is backward(model, batch, objective)"
        )
    if isinstance(objective, type):
        raise TypeError(f"objective={objective.__name__} is a class: pass an instance, {objective.__name__}()")
    if not callable(objective):
        raise TypeError(
            f"objective={shown(objective)} must be a callable objective(model, batch) -> losses of shape (N,), such "
            "as deltasam.Classification()"
        )
    if str(getattr(objective, "__module__", "")).startswith("torch.nn."):
        raise TypeError(
            f"objective={shown(objective)} takes outputs and targets, an objective the model and the batch: write "
            "lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction='none'), for example"
        )


def check_scale(scale: Any) -> None:
    """Raises if the loss scale is not a number greater than 0. The value of a tensor is not read: that would wait."""
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    one = isinstance(scale, Tensor) and scale.numel() == 1
    if not (number or one or (not isinstance(scale, Tensor) and callable(getattr(scale, "scale", None)))):
        raise TypeError(f"scale={shown(scale)} must be a number, a tensor with one element or a GradScaler")
    if number and not 0 < scale < math.inf:
        raise ValueError(
            f"scale={scale} must be a finite number greater than 0: 1 / steps when accumulating over steps, or a "
            "GradScaler; leave it out otherwise"
        )


def check_losses(losses: Any, *, graph: bool, batch: Any = None) -> None:
    """Raises if an objective returned something else than floating-point losses of shape (N,).

    Args:
        losses: The value that it returned.
        graph: Whether the losses must have a graph.
        batch: The batch, if the number of instances is not known yet.
    """
    if not isinstance(losses, Tensor):
        raise TypeError(f"the objective returned {type(losses).__name__}, not a tensor of losses of shape (N,)")
    if losses.ndim == 0:
        raise ValueError(
            "the objective returned a scalar; methods need the loss of every instance, shape (N,): compute it with "
            "reduction='none', or use deltasam.Classification() and its relatives, which take Hugging Face models"
        )
    if losses.ndim != 1:
        shape = tuple(losses.shape)
        raise ValueError(f"the objective returned losses of shape {shape}, not (N,): reduce or squeeze them")
    if not losses.is_floating_point():
        raise TypeError(f"the objective returned {losses.dtype} losses; they must be floating point")
    if losses.shape[0] == 0:
        raise ValueError("the objective returned no losses: the batch is empty")
    if losses.shape[0] == 1 and (size := _instances(batch)) > 1:
        raise ValueError(
            f"the objective returned losses of shape (1,) for a batch of {size} instances, not ({size},): do not "
            f"average, use reduction='none'; return loss.expand({size}) if the loss of the batch cannot be split, and "
            "give the tensors of a batch of one instance a first dimension of 1"
        )
    if graph and not losses.requires_grad:
        raise ValueError(
            "the losses do not depend on any trainable parameter: the objective detached them, ran under no_grad or "
            "inference_mode, or used only frozen parts of the model"
        )


def require_real(params: Collection[Tensor], named: Mapping[str, Tensor]) -> None:
    """Raises a TypeError if a parameter is complex: perturbations are defined for real ones."""
    for p in params if any(dtype.is_complex for dtype in set(map(_DTYPE, params))) else ():
        if p.is_complex():
            name = next((name for name, other in named.items() if other is p), "?")
            raise TypeError(
                f"the parameter {name!r} is complex, and perturbations are defined for real parameters only: exclude "
                "it with params=lambda name, p: not p.is_complex(), or store it as real numbers (torch.view_as_real)"
            )


def require_apart(params: Collection[Tensor], named: Mapping[str, Tensor]) -> None:
    """Raises a ValueError if a parameter to move shares memory with another one: it cannot be moved alone.

    Args:
        params: The parameters to move.
        named: All parameters by name, including those that stay at w (frozen or excluded).
    """
    found = sharing(params, named.values())
    if found is None:
        return
    one, other = (name for name, p in named.items() if p is found[0] or p is found[1])
    frozen = "".join(f" ({name!r} is frozen)" for name in (one, other) if not named[name].requires_grad)
    raise ValueError(
        f"the parameters {one!r} and {other!r} share memory (.data), and one cannot be perturbed without the "
        f"other{frozen}: tie the parameters themselves, model.{other} = model.{one}, give one of them its own memory, "
        "p.data = p.data.clone(), or exclude both with params=lambda name, p: ..."
    )


def sharing(params: Iterable[Tensor], others: Iterable[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Two parameters that overlap in memory, at least one of them in ``params``, which are to be moved; or None.

    Views of one tensor may be disjoint or interleaved without overlap: of a tensor that is not contiguous only the
    first element counts. Shards are not checked: FSDP owns their memory.
    """
    moved = {id(p): p for p in params}
    every = {**moved, **{id(p): p for p in others}}
    spans = sorted(span for key, p in every.items() if (span := (*_span(p), key))[2])
    last: dict[bool, tuple[int, int, int, int]] = {}  # by whether it is moved: the span that ends last so far
    for span in spans:
        device, start, end, key = span
        for is_moved, (there, _, reach, before) in last.items():
            overlap = there == device and start < reach and (is_moved or key in moved)
            if overlap and all(every[k].untyped_storage().nbytes() for k in (before, key)):  # FSDP may have freed one
                return every[before], every[key]
        kind = key in moved
        if kind not in last or (device, end) > (last[kind][0], last[kind][2]):
            last[kind] = span
    return None


def _span(p: Tensor) -> tuple[int, int, int]:
    """The device, start and end of the memory; the end is 0 if there is none (empty, meta) or FSDP owns it."""
    if type(p) not in (nn.Parameter, Tensor) or p.layout is not torch.strided or not (start := p.data_ptr()):
        return -1, 0, 0
    return p.get_device(), start, start + (p.nbytes if p.is_contiguous() else p.element_size())


_DTYPE = attrgetter("dtype")
# What the answer of check_move depends on. Numbers and types only: nothing is kept alive.
_READ = (id, type, _DTYPE, Tensor.get_device, Tensor.data_ptr, attrgetter("nbytes"), Tensor.is_contiguous)
_PASSED: WeakKeyDictionary[nn.Module, list[list[Any]]] = WeakKeyDictionary()


def check_move(model: nn.Module, params: Collection[Tensor], named: Mapping[str, Tensor]) -> None:
    """Refuses parameters that cannot be moved: complex ones, and those that share memory.

    Once per model: again if another parameter, another memory, or another selection is to be moved.
    """
    now: list[list[Any]] | None
    try:
        now = [list(map(id, params)), *(list(map(read, named.values())) for read in _READ)]
    except RuntimeError:  # a parameter without plain memory, such as a sparse one
        now = None
    if now is not None and _PASSED.get(model) == now:
        return
    require_real(params, named)
    require_apart(params, named)
    if now is not None and set(now[0]) <= set(now[1]):
        _PASSED[model] = now


def warn_if_changed(batch: Any, before: list[int]) -> None:
    """Warns if a pass has changed the tensors of a batch in place, given their versions before the pass."""
    if versions(batch) != before:
        warnings.warn(
            "the model or the objective has changed the batch in place, and the next pass of the step starts from the "
            "changed batch: change a clone instead (x = x.clone())",
            stacklevel=2,
        )


def _instances(batch: Any) -> int:
    """The number of instances of the batch, if all its tensors agree on it; else 1.

    They disagree for graphs, bags and packed sequences, and if one of them is a scalar. Vectors of one length are
    assumed to have one entry per instance (users, items, ratings).
    """
    sizes = {tensor.shape[0] if tensor.ndim else 1 for tensor in tensors(batch)}
    return sizes.pop() if len(sizes) == 1 else 1


def uses_a_graph_twice(error: RuntimeError) -> bool:
    """Whether an error means that ``backward`` was called on the losses of a step twice, or without a graph."""
    signs = (
        "backward through the graph a second time",
        "does not require grad and does not have a grad_fn",
        "backward() called inside a functorch transform",
    )
    return any(sign in str(error) for sign in signs)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error means that an accelerator, or the host, is out of memory."""
    host = ("DefaultCPUAllocator", "can't allocate memory", "bad_alloc")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in host)


def readable(values: Tensor) -> bool:
    """Whether values can be read without a synchronisation: on the CPU, and not in torch.func or torch.compile."""
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not in_function_transform()
