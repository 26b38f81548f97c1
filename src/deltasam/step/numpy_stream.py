"""NumPy's global stream, which is read and written only where it has moved.

NumPy reads and writes the 624 words of a state one by one, which takes as long as a small step. A copy of their memory
takes a microsecond. It lacks the second of two normal numbers, which NumPy keeps for the next call: while there is
one, the state is always read and written.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

_SIZE = 625 * 4  # bytes: the words, and the place of the next one
_known: tuple[Any, int] = None, 0  # the generator behind the stream, and the address of its words


class NumpyState(NamedTuple):
    """A state of the stream.

    Attributes:
        state: What ``numpy.random.get_state()`` returns.
        memory: The memory of the stream in this state; None if it does not tell the whole state.

    Example:
        >>> import numpy
        >>> _ = numpy.random.seed(0)
        >>> start = read()
        >>> read(earlier=start) is start
        True
        >>> _ = numpy.random.rand()
        >>> start.is_current(), read(earlier=start) is start
        (False, False)
        >>> start.restore()
        >>> start.is_current()
        True
    """

    state: Any
    memory: bytes | None

    def is_current(self) -> bool:
        """Whether the stream is known to be in this state."""
        return self.memory is not None and self.memory == _memory()

    def restore(self) -> None:
        """Moves the stream to this state."""
        if not self.is_current():
            sys.modules["numpy"].random.set_state(self.state)


def read(earlier: NumpyState | None = None) -> NumpyState | None:
    """The state of the stream, the earlier one if it has not moved since; None if NumPy is not loaded."""
    if earlier is not None and earlier.is_current():
        return earlier
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    state = numpy.random.get_state()
    _, words, place, has_another, _ = state
    memory = None if has_another else _memory()
    is_whole = memory == words.tobytes() + int(place).to_bytes(4, sys.byteorder)
    return NumpyState(state, memory if is_whole else None)


def _memory() -> bytes | None:
    """The words of the stream and the place in them; None if the generator is not the usual one."""
    global _known  # noqa: PLW0603
    current: Any = getattr(sys.modules["numpy"].random, "get_bit_generator", None)  # numpy 1.24
    if current is None:
        return None
    generator = current()
    if _known[0] is not generator:  # a user can set another one
        is_usual = type(generator).__name__ == "MT19937"
        _known = generator, generator.ctypes.state_address if is_usual else 0
    return ctypes.string_at(_known[1], _SIZE) if _known[1] else None
