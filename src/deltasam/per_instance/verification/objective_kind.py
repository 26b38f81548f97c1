"""Distinguishes objectives: what was verified for one may not hold for another, whose instances may mix."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from deltasam.objectives.nesting import layers


def kind_of(objective: Any) -> Hashable:
    """The code of a function or the class of an object, and the settings it was made with.

    Not the objective itself: it may be created anew in every step, and a comparison costs as much as two steps.
    """
    return tuple(kind for each in layers(objective) for kind in (_code(each), *_settings(each)))


def _code(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", type(function))


def _settings(function: Any) -> Iterator[Hashable]:
    """The flags, strings and functions among the settings: how instances are treated may depend on them.

    Numbers are ignored: counters and schedules change them from step to step.
    """
    while isinstance(function, partial):
        yield from _kinds(function.args)
        yield from _kinds(function.keywords.values())
        function = function.func
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # the cell is still empty
            yield from _kinds([cell.cell_contents])
    yield from _kinds(getattr(getattr(function, "__self__", function), "__dict__", {}).values())


def _kinds(values: Iterable[Any]) -> Iterator[Hashable]:
    for value in values:
        if isinstance(value, (bool, str)):
            yield value
        elif callable(value):
            yield _code(value)
