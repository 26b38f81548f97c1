"""Radii as users give them: numbers, rules, and mappings from groups of parameters to these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltasam.step.checks import check_number, shown
from deltasam.step.radius._base import Fixed, Radius
from deltasam.step.radius._groups import REST, Groups
from deltasam.step.selection import KINDS


def as_radius(rho: Any) -> Radius:
    """A rule from a number, a tensor of one number, a rule, or a mapping from groups of parameters to any of these."""
    if isinstance(rho, Radius):
        return rho
    if isinstance(rho, Mapping):
        return _groups(rho)
    return Fixed(rho)


def check_radius(name: str, value: Any) -> None:
    """Raises an error that names the argument, unless the value is a number of at least 0, a rule, or a mapping.

    Raises:
        TypeError: The value is the class of a rule.
        ValueError: The value, or one in the mapping, is not a number of at least 0.
    """
    if isinstance(value, (Radius, Mapping)):
        as_radius(value)  # checks the keys and values of a mapping
        return
    if isinstance(value, type) and issubclass(value, Radius):
        raise TypeError(f"{name}={value.__name__} is a class: write {name}={value.__name__}(...)")
    check_number(name, value, 0)


def _groups(given: Mapping[Any, Any]) -> Groups:
    if not given:
        raise ValueError("rho={} has no group: write for example rho={'embeddings': 0, 'rest': 0.01}")
    for key, value in given.items():
        if not callable(key):
            _check_key(key)
        check_radius(f"rho[{shown(key)}]", value)
    return Groups(tuple((key, as_radius(value)) for key, value in given.items()))


def _check_key(key: Any) -> None:
    if not isinstance(key, str):
        raise TypeError(f"rho has the group {shown(key)}, which is neither a string nor a predicate (name, p) -> bool")
    if key not in (*KINDS, REST) and not any(mark in key for mark in "*?[."):
        kinds = ", ".join(map(repr, (*KINDS, REST)))
        raise ValueError(f"rho has the group {key!r}: use one of {kinds}, or a pattern of names such as {key + '*'!r}")
