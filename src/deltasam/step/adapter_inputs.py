"""PEFT casts the input of an adapter to the dtype of its weights, and autocast casts it back.

A half-precision input makes this way through float32 unchanged, but it costs time, and each adapter keeps a copy.
Where a method intercepts the layers anyway, its passes under autocast leave the casts out, with the switch that PEFT
has for it. ``results/lora`` shows what that saves: BiLoRA was measured with the casts (first file) and without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, starmap
from operator import setitem
from typing import Any

import torch
from torch import nn

from deltasam.step.adapters import is_adapted

SWITCH = "cast_input_dtype_enabled"


class UnlessAutocast:
    """True outside autocast, which may be entered inside the forward of the model."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __bool__(self) -> bool:
        """Whether to cast."""
        return not torch.is_autocast_enabled(self._kind)


def casting(module: nn.Module) -> dict[str, Any] | None:
    """The attributes of a layer that casts the inputs of its adapters; None for other layers."""
    return vars(module) if is_adapted(module) and getattr(module, SWITCH, True) is True else None


@contextmanager
def without_input_casts(model: nn.Module) -> Iterator[None]:
    """Inside, adapters under autocast take their inputs as they are."""
    layers = [own for own in map(casting, model.modules()) if own is not None]
    value = UnlessAutocast(next(model.parameters()).device.type)
    had = [(own, SWITCH, own[SWITCH]) for own in layers if SWITCH in own]
    had_not = [(own, SWITCH, None) for own in layers if SWITCH not in own]
    back = chain(starmap(setitem, had), starmap(dict.pop, had_not))
    try:
        for own in layers:
            own[SWITCH] = value
        yield
    finally:
        deque(back, maxlen=0)  # one call: an interruption (Ctrl-C) finds all of them restored, or none
