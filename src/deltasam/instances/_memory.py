"""What the engine has learned about a model: how ambiguous inputs are laid out, and which shapes were verified."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from deltasam.instances._layout import Kind
from deltasam.instances._step import CallKey
from deltasam.instances._tensors import Order

Signature = frozenset[tuple[CallKey, Kind]]


@dataclass
class Memory:
    """Lives as long as the model; holds names and shapes, no tensors."""

    order: Order = "flat"
    kinds: dict[CallKey, Kind] = field(default_factory=dict)
    verified: set[tuple[tuple[str, ...], Signature]] = field(default_factory=set)
    told: set[str] = field(default_factory=set)


_MEMORIES: WeakKeyDictionary[nn.Module, Memory] = WeakKeyDictionary()


def tell_once(model: nn.Module, message: str) -> None:
    """Warns, once for each model and message."""
    told = memory_of(model).told
    if message not in told:
        told.add(message)
        warnings.warn(message, stacklevel=2)


def memory_of(model: nn.Module) -> Memory:
    """The memory of a model, empty at first."""
    return _MEMORIES.setdefault(model, Memory())
