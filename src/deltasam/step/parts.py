"""Whether the batch that an objective is given is a part of a larger one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
