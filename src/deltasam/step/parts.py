"""Whether an objective is called with a part of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_in_a_part = False


@contextmanager
def part_of_a_step(is_one: bool = True) -> Iterator[None]:
    """Inside, objectives are called with a part of a batch, which may have no target, unlike a whole batch.

    This is global state and not an argument because objectives are arbitrary callables that wrap each other. Nested
    contexts stay inside a part.
    """
    global _in_a_part  # noqa: PLW0603
    before, _in_a_part = _in_a_part, _in_a_part or is_one
    try:
        yield
    finally:
        _in_a_part = before


def is_part_of_a_step() -> bool:
    """Whether the current batch is a part of a larger one."""
    return _in_a_part
