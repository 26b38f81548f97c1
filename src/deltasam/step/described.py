"""The attributes that describe the buffers of a module: a cache that grows is a buffer, its length a number beside it.

If a pass changes or replaces a buffer, the plain attributes of its module are put back together with it, and buffers
that the pass has added are taken away. Modules without buffers, torch's own modules and batch norms are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deltasam._torch import BATCH_NORM, version_of

GONE: Any = object()  # in place of the value of an entry that is not there
_PLAIN = frozenset({bool, int, float, str, tuple, type(None), torch.dtype, torch.device, torch.Size, Tensor})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # the mode, and what belongs to hooks

Entry = tuple[dict[str, Any], str, Any]
Marks = tuple[list[str], list[int], list[int]]  # names, objects, versions


def marks_of(buffers: dict[str, Any]) -> Marks:
    """Other ones after a buffer has been written to, replaced, added or removed."""
    values = buffers.values()
    try:
        versions = list(map(version_of, values))
    except (AttributeError, RuntimeError):  # None, or a tensor of inference mode
        versions = list(map(times_written, values))
    return list(buffers), list(map(id, values)), versions


class Look(NamedTuple):
    """What a module holds at one time."""

    buffers: dict[str, Any]
    marks: Marks
    attributes: dict[str, Any]
    names: Set[str]  # of attributes, also those that are not kept


class Described:
    """A module with buffers, and with attributes that may describe them, such as the length of a cache."""

    def __init__(self, attributes: dict[str, Any], buffers: dict[str, Any]) -> None:
        self.attributes, self.buffers = attributes, buffers
        self._slots = frozenset(buffers)

    def look(self) -> Look:
        """What it holds now."""
        kept = self.attributes.copy()
        names: Set[str] = kept.keys()
        if Tensor in map(type, kept.values()):  # one with a graph would keep the activations of an earlier step
            names = frozenset(kept)
            kept = {name: v for name, v in kept.items() if type(v) is not Tensor or v.grad_fn is None}
        return Look(self.buffers.copy(), marks_of(self.buffers), kept, names)

    def entries(self, then: Look) -> Iterator[Entry]:
        """Those that give back the attributes of then, and what was added to the buffers."""
        now = self.look()
        for name, value in then.attributes.items():
            if type(value) in _PLAIN and name not in _OF_EVERY_MODULE:
                yield self.attributes, name, value
        for name in now.attributes.keys() - then.names:
            if type(now.attributes[name]) in _PLAIN:
                yield self.attributes, name, GONE
        for name in (now.buffers.keys() | then.buffers.keys()) - self._slots:
            yield self.buffers, name, then.buffers.get(name, GONE)


def is_known(module: nn.Module) -> bool:
    """Whether no attribute describes a buffer: torch's own classes, and all batch norms, of which models have many."""
    return type(module).__module__.startswith("torch.") or isinstance(module, BATCH_NORM)


def times_written(buffer: Tensor | None) -> int:
    """Changes with every write, except writes through ``.data``."""
    return 0 if buffer is None or buffer.is_inference() else version_of(buffer)
