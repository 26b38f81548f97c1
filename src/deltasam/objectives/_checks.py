"""Checks of arguments and labels; values are read on the CPU only, elsewhere that would wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_in_a_part = False


@contextmanager
def part_of_a_step(is_one: bool = True) -> Iterator[None]:
    """Inside, objectives are given a part of a batch, which may be without a target where the batch may not.

    Said aside and not as an argument: objectives are callables of the user's, and wrap each other. What is whole
    inside of a part is a part too.
    """
    global _in_a_part  # noqa: PLW0603
    before, _in_a_part = _in_a_part, _in_a_part or is_one
    try:
        yield
    finally:
        _in_a_part = before


def is_part_of_a_step() -> bool:
    """Whether the batch at hand is a part of a larger one."""
    return _in_a_part


def check_smoothing(label_smoothing: float) -> None:
    """Label smoothing is a share of the target's probability: 0 <= s < 1."""
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, but must be at least 0 and less than 1")


def check_integer(labels: Tensor, owner: str, way_out: str) -> None:
    """Class labels are integers; floating-point ones are a sign of another kind of task."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{owner}: labels have type {labels.dtype}, but must be integers; {way_out}")


def check_range(labels: Tensor, classes: int, owner: str, ignore_index: int | None = None) -> None:
    """Labels lie in [0, classes) or are ignored; read on the CPU only."""
    outside = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        outside &= labels != ignore_index
    if readable(outside) and bool(outside.any()):
        also = "" if ignore_index is None else f" or {ignore_index} (ignore_index)"
        raise ValueError(
            f"{owner}: labels contain {int(labels[outside][0])}, but the model has {classes} classes: "
            f"labels must be 0 to {classes - 1}{also}; check the labels or the model's number of classes"
        )


def readable(values: Tensor) -> bool:
    """Whether looking at the values is free and allowed: on the CPU, and not under torch.func or torch.compile."""
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is None
