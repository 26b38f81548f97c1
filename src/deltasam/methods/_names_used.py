"""The names of attributes and globals that a function uses, found from its code."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any


def names_in(value: Any) -> Iterator[str]:
    """The names in a function, those of the functions inside it included; of anything else, none.

    Example:
        >>> sorted(names_in(lambda method: method.radius))
        ['radius']
    """
    if isinstance(value, FunctionType):
        yield from _names_in(value.__code__)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
