"""Registers methods, weightings, regularisers and tasks of the user by name."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from typing import Any, TypeVar

from deltasam.lab.catalogue import METHODS
from deltasam.lab.experiments._parts import REGULARISERS, WEIGHTINGS
from deltasam.lab.tasks import TASKS, Task
from deltasam.methods import Method
from deltasam.objectives import Objective
from deltasam.step.names import method_key, normalized
from deltasam.weighting import Weighting

Part = TypeVar("Part")

_KINDS: tuple[tuple[str, type, dict[str, Any]], ...] = (
    ("method", Method, METHODS),
    ("weighting", Weighting, WEIGHTINGS),
    ("regulariser", Objective, REGULARISERS),
)


def register(part: Part) -> Part:
    """Registers a method, weighting, regulariser or task, so that it can be chosen by name.

    Use it as the outermost decorator of a class, or call it with a task. Registrations in modules named by
    ``DELTASAM_PLUGINS``, or by entry points of the group ``deltasam.plugins``, are also known to the commands and to
    the processes of a sweep.

    Args:
        part: A dataclass derived from :class:`~deltasam.Method`, :class:`~deltasam.Weighting` or, with a field
            ``objective``, :class:`~deltasam.Objective`; it is registered by the name of the class. Or a
            :class:`~deltasam.lab.tasks.Task`.

    Returns:
        ``part``.

    Raises:
        TypeError: ``part`` is none of these.
        ValueError: The name is taken or not valid.

    Example:
        >>> from dataclasses import dataclass
        >>> from deltasam import Weighting
        >>> @register
        ... @dataclass(frozen=True, kw_only=True)
        ... class ByLoss(Weighting):
        ...     def probe(self, passes, *, rho, eta, seed):
        ...         return lambda losses: losses
        >>> WEIGHTINGS.pop("ByLoss").__name__
        'ByLoss'
    """
    if isinstance(part, Task):
        _put(TASKS, part.name, part, "task")
        return part
    for what, base, table in _KINDS:
        if inspect.isclass(part) and issubclass(part, base):
            _check(part, what)
            _put(table, part.__name__, part, what)
            return part
    raise TypeError(
        f"register({getattr(part, '__name__', part)}): must be a class derived from Method, Weighting or Objective (a "
        "regulariser), or a task object"
    )


def _check(kind: Any, what: str) -> None:
    """Checks what configuration files rely on, at the definition of the class."""
    if "__dataclass_fields__" not in vars(kind):
        raise TypeError(f"register({kind.__name__}): must be a dataclass; add @dataclass(frozen=True) below @register")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise TypeError(f"register({kind.__name__}): must define {missing} to be a {what}")
    if what == "regulariser" and "objective" not in {f.name for f in dataclasses.fields(kind)}:
        raise TypeError(f"register({kind.__name__}): must have a field `objective`, the one it wraps")
    try:
        typing.get_type_hints(kind)
    except NameError as error:
        raise TypeError(f"register({kind.__name__}): the type of a field cannot be resolved ({error})") from error


def _put(table: dict[str, Any], name: str, part: Any, what: str) -> None:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"register: the {what} {name!r} must have a name of letters, digits, `.`, `_` and `-`")
    key = method_key if what == "method" else normalized
    for known, other in table.items():
        if key(known) == key(name) and not _is_same(part, other):
            owner = other if inspect.isclass(other) else type(other)
            raise ValueError(
                f"register: the name {name!r} is taken by the {what} {known} of {owner.__module__}; choose another"
            )
    table[name] = part


def _is_same(part: Any, other: Any) -> bool:
    """Whether the same part is registered again, such as a class in a notebook cell that is run twice."""
    if not inspect.isclass(part):
        return bool(part == other)
    return (part.__module__, part.__qualname__) == (other.__module__, other.__qualname__)
