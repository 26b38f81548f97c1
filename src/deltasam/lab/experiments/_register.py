"""Parts of the user's own, made known by name."""

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
from deltasam.step.names import spelled
from deltasam.weighting import Weighting

Part = TypeVar("Part")

_KINDS: tuple[tuple[str, type, dict[str, Any]], ...] = (
    ("method", Method, METHODS),
    ("weighting", Weighting, WEIGHTINGS),
    ("regulariser", Objective, REGULARISERS),
)


def register(part: Part) -> Part:
    """Makes a method, weighting, regulariser or task of one's own known by name, as those of the package are.

    Above the class of a method, a weighting or a regulariser it is a decorator, the first one; a task is an object and
    is handed over. What a module registers that ``DELTASAM_PLUGINS`` names, or an entry point of the group
    ``deltasam.plugins``, the commands and the processes of a sweep know as well.

    Args:
        part: A dataclass derived from :class:`~deltasam.Method`, :class:`~deltasam.Weighting` or, with a field
            ``objective``, :class:`~deltasam.Objective`; its name is that of the class. Or a
            :class:`~deltasam.lab.tasks.Task`.

    Returns:
        The same.

    Raises:
        TypeError: It is none of these.
        ValueError: The name is taken already, or is none.

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
    if not inspect.isclass(part):
        raise TypeError(f"register({part!r}): must be the class of a method, a weighting or a regulariser, or a task")
    if issubclass(part, Task):
        raise TypeError(f"register({part.__name__}): a task is an object, {part.__name__}(name=...), not its class")
    for what, base, table in _KINDS:
        if issubclass(part, base):
            _check(part, what)
            _put(table, part.__name__, part, what)
            return part
    raise TypeError(
        f"register({part.__name__}): must be derived from Method, Weighting, Objective (a regulariser) or Task"
    )


def _check(kind: Any, what: str) -> None:
    """What the configuration files rely on, told where the class is written."""
    if "__dataclass_fields__" not in vars(kind):
        raise TypeError(
            f"register({kind.__name__}): must be a dataclass; write @dataclass(frozen=True) between @register and "
            "the class"
        )
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise TypeError(f"register({kind.__name__}): has no {missing}, which a {what} must have")
    if what == "regulariser" and "objective" not in {f.name for f in dataclasses.fields(kind)}:
        raise TypeError(
            f"register({kind.__name__}): a regulariser has a field `objective`, the one it wraps; an objective that "
            "wraps none is part of a task"
        )
    try:
        typing.get_type_hints(kind)
    except NameError as error:
        raise TypeError(f"register({kind.__name__}): the type of a field cannot be found ({error})") from error


def _put(table: dict[str, Any], name: str, part: Any, what: str) -> None:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"register: a {what} cannot have the name {name!r}, which is to be part of a folder's")
    for known, other in table.items():
        if spelled(known) == spelled(name) and not _is_again(part, other):
            owner = other if inspect.isclass(other) else type(other)
            raise ValueError(
                f"register: the name {name!r} is taken already by the {what} {known} of {owner.__module__}; choose "
                "another"
            )
    table[name] = part


def _is_again(part: Any, other: Any) -> bool:
    """Whether this is what has the name already, such as the class of a cell of a notebook that is run again."""
    if not inspect.isclass(part):
        return bool(part == other)
    return (part.__module__, part.__qualname__) == (other.__module__, other.__qualname__)
