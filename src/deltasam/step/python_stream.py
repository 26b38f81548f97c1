"""Python's global stream (``random``), which is read and written only where it has moved.

``random.getstate()`` makes 625 integers, which takes as long as several small kernels. A copy of their memory takes a
microsecond. Whether the memory is where it is expected is checked whenever the state is read; if not, the state is
always read and written.
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from typing import Any, NamedTuple

_SIZE = 625 * 4  # bytes: the place of the next word, and the words
_START = object.__basicsize__
_USUAL: Any = random.Random
_IS_THERE = sys.implementation.name == "cpython" and _USUAL.__base__.__basicsize__ >= _START + _SIZE


class PythonState(NamedTuple):
    """A state of the stream.

    Attributes:
        state: What ``random.getstate()`` returns.
        memory: The memory of the stream in this state, and the second of two normal numbers, which is kept for the
            next call; None if the memory does not tell the state.

    Example:
        >>> random.seed(0)
        >>> start = read()
        >>> read(earlier=start) is start
        True
        >>> _ = random.random()
        >>> start.is_current(), read(earlier=start) is start
        (False, False)
        >>> start.restore()
        >>> start.is_current()
        True
    """

    state: Any
    memory: tuple[bytes, float | None] | None

    def is_current(self) -> bool:
        """Whether the stream is known to be in this state."""
        return self.memory is not None and self.memory == _memory()

    def restore(self) -> None:
        """Moves the stream to this state."""
        if not self.is_current():
            random.setstate(self.state)


def read(earlier: PythonState | None = None) -> PythonState:
    """The state of the stream, the earlier one if it has not moved since."""
    if earlier is not None and earlier.is_current():
        return earlier
    state = random.getstate()
    (*words, place), normal = state[1:]
    expected = place.to_bytes(4, sys.byteorder) + array("I", words).tobytes(), normal
    return PythonState(state, expected if expected == _memory() else None)


def _memory() -> tuple[bytes, float | None] | None:
    """The place in the words of the stream, the words, and the normal number; None if the generator is not usual."""
    generator: Any = getattr(random.getstate, "__self__", None)
    if not _IS_THERE or type(generator) is not _USUAL:  # a user can replace the functions of the module
        return None
    return ctypes.string_at(id(generator) + _START, _SIZE), generator.gauss_next
