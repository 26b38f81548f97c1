"""What a step must be given and an objective must return, and the clear words for what came instead."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deltasam._torch import in_function_transform
from deltasam.step.batches import tensors, versions


def shown(value: object) -> str:
    """A value in the words of an error: on one line, and short."""
    words = " ".join(repr(value).split())
    return words if len(words) <= 80 else f"{words[:77]}..."


def check_number(
    name: str, value: float, low: float, high: float = math.inf, *, open_low: bool = False, whole: bool = False
) -> None:
    """Raises a ValueError that names the hyperparameter, its value and the allowed range.

    Args:
        name: The hyperparameter.
        value: What it was set to.
        low: The least value.
        high: The greatest value.
        open_low: Whether ``low`` itself is not allowed.
        whole: Whether it counts something.
    """
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (open_low and value == low):
        bounds = f"{'(' if open_low or math.isinf(low) else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
        kind = "whole number" if whole else "number"
        foreign = " of Python's own type: take its .item()" if hasattr(value, "item") else ""
        raise ValueError(f"{name}={shown(value)} must be a {kind} in {bounds}{foreign}")


def check_step(model: Any, objective: Any) -> None:
    """One clear error for each thing that is put in the place of the model or the objective.

    Raises:
        TypeError: The model is no module, or the objective cannot be called with a model and a batch.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={shown(model)} must be a torch.nn.Module; the order is backward(model, batch, objective)"
        )
    if isinstance(objective, type):
        raise TypeError(f"objective={objective.__name__} is a class: make one of it, {objective.__name__}()")
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
    """Refuses what the loss cannot be multiplied by, as far as it is known without waiting for a device.

    Raises:
        TypeError: It is no number.
        ValueError: It is a number that leaves no gradient, or turns it round.
    """
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    one = isinstance(scale, Tensor) and scale.numel() == 1
    if not (number or one or (not isinstance(scale, Tensor) and callable(getattr(scale, "scale", None)))):
        raise TypeError(f"scale={shown(scale)} must be a number, a tensor with one element or a GradScaler")
    if number and not 0 < scale < math.inf:
        raise ValueError(
            f"scale={scale} must be a finite number greater than 0: 1 / steps when accumulating over so many, or a "
            "GradScaler; leave it out otherwise"
        )


def check_losses(losses: Any, *, graph: bool, batch: Any = None) -> None:
    """One clear error for each way an objective can go wrong.

    Args:
        losses: What it returned.
        graph: Whether they are to have a graph.
        batch: What they are the losses of, if how many there must be is not known yet.

    Raises:
        TypeError: Not a floating-point tensor.
        ValueError: Not of shape (N,), empty, one for a batch of several instances, or without a graph.
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
            f"the objective returned losses of shape (1,) for a batch of {size} instances, not ({size},): leave out "
            f"the mean and use reduction='none'; return loss.expand({size}) if the loss of the batch cannot be taken "
            "apart, and give the tensors of a batch of one instance a first dimension of 1"
        )
    if graph and not losses.requires_grad:
        raise ValueError(
            "the losses do not depend on any trainable parameter: the objective detached them, ran under no_grad or "
            "inference_mode, or used only frozen parts of the model"
        )


def require_real(params: Iterable[Tensor], named: Mapping[str, Tensor]) -> None:
    """Refuses complex parameters, for which no method defines a perturbation.

    Raises:
        TypeError: One of the parameters is complex.
    """
    for p in params:
        if p.is_complex():
            name = next((name for name, other in named.items() if other is p), "?")
            raise TypeError(
                f"the parameter {name!r} is complex, and perturbations are for real ones: leave it out with "
                "params=lambda name, p: not p.is_complex(), or hold it as real numbers (torch.view_as_real)"
            )


def require_apart(params: Collection[Tensor], named: Mapping[str, Tensor]) -> None:
    """Refuses parameters that share their memory: what moves one would move, or would not move, the other.

    Args:
        params: What is to be moved.
        named: Those, and what is to stay (frozen ones, those left out), with their names.

    Raises:
        ValueError: Something that is to be moved overlaps another one, see :func:`sharing`.
    """
    found = sharing(params, named.values())
    if found is None:
        return
    one, other = (name for name, p in named.items() if p is found[0] or p is found[1])
    tied = f"tie the parameters themselves, model.{other} = model.{one}, give one of them memory of its own, "
    if all(p.requires_grad for p in found):
        raise ValueError(
            f"the parameters {one!r} and {other!r} share their memory (.data), and one cannot be perturbed without "
            f"the other: {tied}p.data = p.data.clone(), or leave both out with params=lambda name, p: ..."
        )
    frozen = other if named[one].requires_grad else one
    raise ValueError(
        f"the parameters {one!r} and {other!r} share their memory (.data), and {frozen!r} is frozen "
        f"(requires_grad=False) while the other would be perturbed: {tied}p.data = p.data.clone(), freeze both, or "
        "leave the trainable one out with params=lambda name, p: ..."
    )


def sharing(params: Iterable[Tensor], others: Iterable[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Two parameters that overlap in memory, of which the first group is to be moved, or None.

    Two that both stay may share. Views into one buffer that do not overlap are no pair, interleaved ones neither; of
    those that lie scattered only the beginning is looked at. Shards are let through: their memory is FSDP's.
    """
    moved = {id(p): p for p in params}
    every = {**moved, **{id(p): p for p in others}}
    spans = sorted(span for key, p in every.items() if (span := (*_span(p), key))[2])
    last: dict[bool, tuple[int, int, int, int]] = {}  # by whether it is moved: the one that reaches furthest so far
    for span in spans:
        device, start, end, key = span
        for is_moved, (there, _, reach, before) in last.items():
            overlap = there == device and start < reach and (is_moved or key in moved)
            if overlap and all(every[k].untyped_storage().nbytes() for k in (before, key)):  # not freed meanwhile
                return every[before], every[key]
        kind = key in moved
        if kind not in last or (device, end) > (last[kind][0], last[kind][2]):
            last[kind] = span
    return None


def _span(p: Tensor) -> tuple[int, int, int]:
    """The device and where its memory begins and ends; 0 if it has none (empty, meta) or not its own (shards)."""
    if type(p) not in (nn.Parameter, Tensor) or p.layout is not torch.strided or not (start := p.data_ptr()):
        return -1, 0, 0
    return p.get_device(), start, start + (p.nbytes if p.is_contiguous() else p.element_size())


def check_move(params: Collection[Tensor], named: Mapping[str, Tensor]) -> None:
    """Refuses parameters that cannot be moved: complex ones, and those that share their memory.

    Args:
        params: What is to be moved.
        named: Those, and what is to stay, with their names.
    """
    require_real(params, named)
    require_apart(params, named)


def say_if_changed(batch: Any, before: list[int]) -> None:
    """Warns of a pass that has changed the tensors of a batch, if those were of these versions before it."""
    if versions(batch) != before:
        warnings.warn(
            "the model or the objective has changed the batch in place, and the next pass of the step gets it so: "
            "unless twice is as good as once, let it change a clone (x = x.clone())",
            stacklevel=2,
        )


def _instances(batch: Any) -> int:
    """How many instances are in the batch, if its tensors leave no doubt; else 1.

    There is doubt where they disagree (a graph, a bag, packed sequences), and where one is a number. Vectors of one
    length are users, items and ratings more often than one sequence, which can be given a batch dimension.
    """
    sizes = {tensor.shape[0] if tensor.ndim else 1 for tensor in tensors(batch)}
    return sizes.pop() if len(sizes) == 1 else 1


def uses_a_graph_twice(error: RuntimeError) -> bool:
    """Whether somebody else has called ``backward`` on the losses of a step, or tried to where there is no graph."""
    signs = (
        "backward through the graph a second time",
        "does not require grad and does not have a grad_fn",
        "backward() called inside a functorch transform",
    )
    return any(sign in str(error) for sign in signs)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an accelerator, or the host, had no memory left."""
    host = ("DefaultCPUAllocator", "can't allocate memory", "bad_alloc")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in host)


def readable(values: Tensor) -> bool:
    """Whether looking at the values is free and allowed: on the CPU, and not under torch.func or torch.compile."""
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not in_function_transform()
