"""The buffers of the model (``register_buffer``): every pass of a step starts with the same values.

BatchNorm's statistics are small, and copied. Quantised models keep their weights in buffers, and copying those for
every pass can take longer than the passes, so large buffers are copied only if a pass changes them. The tensors that a
*method* keeps between steps are another matter, see :meth:`deltasam.methods.Method.buffer`.

The attributes that describe a buffer, such as the length of a cache, are put back with it: see
:mod:`~deltasam.step.described`.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, compress, starmap
from operator import attrgetter, delitem, getitem, ne, or_, setitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from deltasam.step.branches import is_recorded
from deltasam.step.described import GONE, Described, Entry, Look, Marks, is_known, marks_of, times_written
from deltasam.step.structure import Structure

SMALL = 64 * 1024  # bytes; smaller buffers are always copied: that is cheap, and right whatever a pass does to them

_marks = attrgetter("marks")


@dataclass
class _Seen:
    """Whether a pass has changed a large buffer; if none has, its version and the modes of the modules then."""

    changes: bool = False
    version: int = -1
    modes: set[bytes] = field(default_factory=set)


_SEEN: Any = WeakIdKeyDictionary()  # Tensor: _Seen


class ModelBuffers:
    """The values of a model's buffers at the start of a step.

    A large buffer is copied until an extra pass has left it unchanged, and again when its version changes between
    steps. If a later pass changes it for the first time, its starting value is lost for that step: a warning names the
    buffer, and from then on it is copied in every step. (Writes through ``.data`` do not change the version; they are
    found by comparing values, in the first step only.) Buffers that are None are included: a pass may fill them.
    ``structure`` is that of the model, if the caller has it already.
    """

    def __init__(self, model: nn.Module, structure: Structure | None = None) -> None:
        structure = Structure(model) if structure is None else structure
        modules, owners = structure.with_buffers
        self._slots = [(own, name) for own in owners for name in own]
        self._owners, self._names = [own for own, _ in self._slots], [name for _, name in self._slots]
        holders = zip(modules, owners, strict=True)
        self._described = [Described(vars(module), own) for module, own in holders if not is_known(module)]
        self._attributes = [module.attributes for module in self._described]
        self._marked = [module.buffers for module in self._described]
        self._model, self._modes = model, structure.modes
        self._own = self._held()
        self._large = {id(b): (b, times_written(b)) for b in self._own if b is not None and _size(b) > SMALL}
        self._constant = {key for key, (b, _) in self._large.items() if self._is_constant(b)}
        self._start = self._copies(self._own)
        self._looks = self._look()

    def _is_constant(self, buffer: Tensor) -> bool:
        seen = _SEEN.get(buffer)
        return (
            seen is not None
            and not seen.changes
            and seen.version == times_written(buffer)
            and self._modes in seen.modes
        )

    def _held(self) -> list[Any]:
        try:
            return list(map(getitem, self._owners, self._names))
        except KeyError:  # a pass has removed a buffer
            return [own.get(name, GONE) for own, name in self._slots]

    def _look(self) -> list[Look]:
        return [module.look() for module in self._described]

    def _marks(self) -> list[Marks]:
        return list(map(marks_of, self._marked))

    def _entries(self, then: list[Look], which: list[bool]) -> list[Entry]:
        """What gives back the attributes of then to some of the modules."""
        if True not in which:
            return []
        chosen = compress(zip(self._described, then, strict=True), which)
        return [entry for module, look in chosen for entry in module.entries(look)]

    def _putting(self, values: list[Any], entries: Sequence[Entry] = ()) -> Iterator[None]:
        """An iterator that assigns the values of the buffers, and the entries, as it is consumed."""
        put: Iterator[None] = map(setitem, self._owners, self._names, values)
        if not entries and id(GONE) not in map(id, values):
            return put
        gone = [slot for slot, value in zip(self._slots, values, strict=True) if value is GONE]
        gone += [(where, name) for where, name, value in entries if value is GONE]
        # What is to be deleted is assigned first, so that it is there.
        return chain(put, starmap(setitem, entries), starmap(delitem, gone))

    def _copies(self, buffers: list[Any]) -> list[Any]:
        """Copies of all buffers except constant ones; a buffer that modules share stays shared."""
        kept = self._constant
        copies = {id(b): b if not isinstance(b, Tensor) or id(b) in kept else b.detach().clone() for b in buffers}
        return [copies[id(buffer)] for buffer in buffers]

    def following(self) -> ModelBuffers:
        """The same buffers, starting with their current values."""
        other = copy(self)
        other._start, other._looks = other._copies(other._held()), other._look()
        return other

    def rewound(self) -> AbstractContextManager[None]:
        """Gives the modules copies of the starting values, which an extra pass may change."""
        return self._rewound() if self._names else nullcontext()

    @contextmanager
    def _rewound(self) -> Iterator[None]:
        self._notice("extra passes of this step start with the new value")
        lent = self._copies(self._start)
        pending = [k for k, own in enumerate(self._own) if id(own) in self._large and id(own) not in self._constant]
        versions = [times_written(lent[k]) for k in pending]
        held, before = self._held(), self._look()
        were_moved = list(map(ne, map(_marks, before), map(_marks, self._looks)))
        there = self._putting(lent, self._entries(self._looks, were_moved))
        buffers_back = self._putting(held)
        attributes_back = map(dict.update, self._attributes, [look.attributes for look in before])
        back: Iterator[None] = chain(buffers_back, attributes_back)
        try:
            deque(there, maxlen=0)
            first = self._marks()
            try:
                yield
            finally:  # a pass that leaves the buffers of a module may change its attributes
                found = self._held()
                moved = [*map(or_, were_moved, map(ne, first, self._marks()))]
                back = self._putting(held, self._entries(before, moved)) if True in moved else buffers_back
        finally:
            deque(back, maxlen=0)  # one call: an interruption (Ctrl-C) finds all of them restored, or none
        for k, version in zip(pending, versions, strict=True):
            if found[k] is self._own[k]:  # the pass has restarted the step: nothing can be learned from it
                continue
            self._learn(k, lent[k], written=found[k] is not lent[k] or times_written(lent[k]) != version)
        self._notice("it keeps the value that an extra pass has written")

    def _learn(self, k: int, lent: Tensor, *, written: bool) -> None:
        """Remembers whether an extra pass has changed its copy of a large buffer."""
        own, version = self._large[id(self._own[k])]
        seen = _SEEN.get(own)
        if is_recorded(own.device) or (seen is not None and seen.changes):
            return
        inner = _SEEN.get(lent)  # a pass inside the extra one may have used a copy of the copy
        changes = written or (inner is not None and inner.changes)
        # Writing through `.data` does not change the version. Comparing waits for the device, so it is done once.
        changes = changes or (seen is None and not _are_equal(lent, self._start[k]))
        modes = seen.modes if seen is not None and seen.version == version else set()
        _SEEN[own] = _Seen(changes, version, modes | {self._modes})

    def _notice(self, consequence: str) -> None:
        """Finds constant buffers that have been written to, warns, and copies them from here on."""
        for key in [key for key in self._constant if times_written(self._large[key][0]) != self._large[key][1]]:
            buffer, _ = self._large[key]
            self._constant.remove(key)
            now = buffer.detach().clone()
            self._start = [now if start is buffer else start for start in self._start]
            if _SEEN[buffer].changes:  # by a pass inside this one, which has warned
                continue
            _SEEN[buffer].changes = True
            name = next((name for name, b in self._model.named_buffers() if b is buffer), "of a module")
            warnings.warn(
                f"a pass changed the buffer {name!r} ({_size(buffer) / 2**20:.1f} MiB), which no pass had changed "
                f"before. Its starting value was not kept: {consequence}. From now on it is copied in every step",
                stacklevel=2,
            )

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the starting values, in the tensors that held them."""
        self._notice("it keeps the new value")
        moved = list(map(ne, self._marks(), map(_marks, self._looks)))
        for own, start in zip(self._own, self._start, strict=True):
            # A large buffer is not written to without need: it would then look like one that changes.
            if start is not own and not (id(own) in self._large and _are_equal(own, start)):
                own.copy_(start)
        deque(self._putting(self._own, self._entries(self._looks, moved)), maxlen=0)
        self._looks = self._look()  # the tensors have other versions now


def _size(buffer: Tensor) -> int:
    return buffer.numel() * buffer.element_size()


def _are_equal(a: Tensor, b: Tensor) -> bool:
    try:
        return torch.equal(a, b)
    except Exception:  # noqa: BLE001 - tensors of a kind that cannot be compared are copied
        return False
