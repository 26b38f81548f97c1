"""An assignment to a frozen method is answered with the way out."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

from deltasam.step.checks import shown

_telling: set[type] = set()


def explain_assignments(kind: type) -> None:
    """Lets ``method.rho = 0.1`` say how to make a method with another rho.

    ``dataclass`` writes a ``__setattr__`` of its own into every frozen class, after the class has been made, and wants
    none to be there. So it is wrapped once per class, when the first method of the class is made: no step, and no
    later method, pays for it.
    """
    for each in kind.__mro__:
        own = each.__dict__.get("__setattr__")
        if each is object or own is None or each in _telling:
            continue
        _telling.add(each)
        setattr(each, "__setattr__", _wrapped(own))  # noqa: B010 - mypy forbids to assign to a method


def _wrapped(own: Any) -> Any:
    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        try:
            own(self, name, value)
        except FrozenInstanceError:
            raise FrozenInstanceError(_words(self, name, value)) from None

    return __setattr__


def _words(method: Any, name: str, value: Any) -> str:
    kind = type(method).__name__
    hyperparameters = [f.name for f in fields(method) if f.init]
    if name not in hyperparameters:
        return f"{kind} is frozen and has no hyperparameter {name!r}; it has {', '.join(hyperparameters)}"
    change = f"{name}={shown(value)}"
    return (
        f"{kind} is frozen: {change} cannot be assigned; make another one by dataclasses.replace(method, {change}), "
        f"or by method.replace({change}), which keeps what it remembers of earlier steps"
    )
