"""Checks of arguments and labels. Values are read on the CPU only: elsewhere reading synchronises with the device."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, get_args

import torch
from torch import Tensor

from deltasam.step.checks import readable


def check_smoothing(label_smoothing: float) -> None:
    """Raises a ValueError unless 0 <= s < 1: label smoothing is a share of the target's probability."""
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, but must be at least 0 and less than 1")


def check_integer(labels: Tensor, owner: str, remedy: str) -> None:
    """Raises a ValueError unless the labels are integers; floating-point labels belong to another kind of task."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{owner}: labels have type {labels.dtype}, but must be integers; {remedy}")


def check_range(labels: Tensor, classes: int, owner: str, ignore_index: int | None = None) -> None:
    """Raises a ValueError unless all labels lie in [0, classes) or are ignored; reads them on the CPU only."""
    outside = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        outside &= labels != ignore_index
    if readable(outside) and bool(outside.any()):
        also = "" if ignore_index is None else f" or {ignore_index} (ignore_index)"
        raise ValueError(
            f"{owner}: labels contain {int(labels[outside][0])}, but the model has {classes} classes: "
            f"labels must be 0 to {classes - 1}{also}; check the labels or the model's number of classes"
        )


def check_choice(owner: str, name: str, value: Any, choices: Any) -> None:
    """Raises a ValueError that names the argument, its value and the choices."""
    if value not in get_args(choices):
        raise ValueError(f"{owner}({name}={value!r}): must be one of {list(get_args(choices))}")


def check_positive(owner: str, name: str, value: Any, *, zero: bool = True, whole: bool = False) -> None:
    """Raises a ValueError unless the value is a finite number of at least 0, or above 0 without ``zero``."""
    number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not number or not (value >= 0 if zero else value > 0) or value == float("inf"):
        kind = "whole number" if whole else "number"
        raise ValueError(f"{owner}({name}={value!r}): must be a {kind} {'at least' if zero else 'greater than'} 0")
