"""The buffers of the model (``register_buffer``): every pass of a step starts with the same values.

BatchNorm's statistics are small, and copied. Quantised models keep their weights in buffers, and copying those for
every pass can take longer than the passes, so large buffers are copied only if a pass changes them. The tensors that a
*method* keeps between steps are another matter, see :meth:`deltasam.methods.Method.buffer`.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from operator import setitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from deltasam._torch import version_of
from deltasam.step.branches import is_recorded
from deltasam.step.structure import Structure

SMALL = 64 * 1024  # bytes; smaller buffers are always copied: that is cheap, and right whatever a pass does to them


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
        slots = [(own, name) for own in structure.buffers for name in own]
        self._owners, self._names = [own for own, _ in slots], [name for _, name in slots]
        self._model, self._modes = model, structure.modes
        self._own = self._held()
        self._large = {id(b): (b, _version(b)) for b in self._own if b is not None and _size(b) > SMALL}
        self._constant = {key for key, (b, _) in self._large.items() if self._is_constant(b)}
        self._start = self._copies(self._own)

    def _is_constant(self, buffer: Tensor) -> bool:
        seen = _SEEN.get(buffer)
        return seen is not None and not seen.changes and seen.version == _version(buffer) and self._modes in seen.modes

    def _held(self) -> list[Any]:
        return [own[name] for own, name in zip(self._owners, self._names, strict=True)]

    def _putting(self, values: list[Any]) -> Iterator[None]:
        """An iterator that assigns the values as it is consumed."""
        return map(setitem, self._owners, self._names, values)

    def _copies(self, buffers: list[Any]) -> list[Any]:
        """Copies of all buffers except constant ones; a buffer that modules share stays shared."""
        kept = self._constant
        copies = {id(b): b if b is None or id(b) in kept else b.detach().clone() for b in buffers}
        return [copies[id(buffer)] for buffer in buffers]

    def following(self) -> ModelBuffers:
        """The same buffers, starting with their current values."""
        other = copy(self)
        other._start = other._copies(other._held())
        return other

    def rewound(self) -> AbstractContextManager[None]:
        """Gives the modules copies of the starting values, which an extra pass may change."""
        return self._rewound() if self._names else nullcontext()

    @contextmanager
    def _rewound(self) -> Iterator[None]:
        self._notice("extra passes of this step start with the new value")
        lent = self._copies(self._start)
        pending = [k for k, own in enumerate(self._own) if id(own) in self._large and id(own) not in self._constant]
        versions = [_version(lent[k]) for k in pending]
        back, there = self._putting(self._held()), self._putting(lent)
        try:
            deque(there, maxlen=0)
            yield
            found = self._held()
        finally:
            deque(back, maxlen=0)  # one call: an interruption (Ctrl-C) finds all of them restored, or none
        for k, version in zip(pending, versions, strict=True):
            if found[k] is self._own[k]:  # the pass has restarted the step: nothing can be learned from it
                continue
            self._learn(k, lent[k], written=found[k] is not lent[k] or _version(lent[k]) != version)
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
        for key in [key for key in self._constant if _version(self._large[key][0]) != self._large[key][1]]:
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
        for own, start in zip(self._own, self._start, strict=True):
            # A large buffer is not written to without need: it would then look like one that changes.
            if start is not own and not (id(own) in self._large and _are_equal(own, start)):
                own.copy_(start)
        deque(self._putting(self._own), maxlen=0)


def _version(buffer: Tensor) -> int:
    """Changes with every write, except writes through ``.data``."""
    return 0 if buffer.is_inference() else version_of(buffer)


def _size(buffer: Tensor) -> int:
    return buffer.numel() * buffer.element_size()


def _are_equal(a: Tensor, b: Tensor) -> bool:
    try:
        return torch.equal(a, b)
    except Exception:  # noqa: BLE001 - tensors of a kind that cannot be compared are copied
        return False
