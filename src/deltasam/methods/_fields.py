"""Hyperparameters that state their range where they are declared.

``rho: float = radius(0.05)`` is a dataclass field with a default and a check. :class:`~deltasam.methods.Method` runs
the checks, so most methods need no ``__post_init__``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, get_args

from deltasam.step.checks import check_number, shown
from deltasam.step.radius import Rho, check_radius

Check = Callable[[str, Any], None]


def number(
    default: float | None,
    *,
    low: float = 0,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
    whole: bool = False,
    optional: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """A field that holds a number in a range.

    Args:
        default: The default.
        low: The least value.
        high: The greatest value.
        open_low: Whether ``low`` itself is excluded.
        open_high: Whether ``high`` itself is excluded.
        whole: Whether it must be a whole number.
        optional: Whether None is allowed.
        metadata: More metadata of the field.

    Example:
        >>> from dataclasses import dataclass
        >>> from deltasam import SAM
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Mine(SAM):
        ...     alpha: float = number(0.5, high=1)
        >>> Mine(alpha=2)
        Traceback (most recent call last):
        ValueError: alpha=2 must be a number in [0, 1]
    """

    def check(name: str, value: Any) -> None:
        if value is not None or not optional:
            check_number(name, value, low, high, open_low=open_low, open_high=open_high, whole=whole)

    return field(default=default, metadata={"check": check, **(metadata or {})})


def radius(default: Rho = 0.01) -> Any:
    """A field that holds the radius of a perturbation: a number of at least 0, or a rule, see :data:`Rho`.

    A method with ``rho = 0`` is ERM. In ``_step``, use ``self.radius``, which is the radius of this step.

    Args:
        default: By default 0.01, at which SAM was as good as with radii tuned per task (docs/results.md).
            The paper has 0.05 for BERT-base.
    """
    return field(default=default, metadata={"check": check_radius})


def random_seed(default: int = 0) -> Any:
    """A field that holds the seed of random numbers: any whole number."""
    return number(default, low=-math.inf, whole=True)


def choice(default: str, options: Any, *, metadata: Mapping[str, Any] | None = None) -> Any:
    """A field that holds one of the options of a ``Literal`` type."""
    allowed = get_args(options)

    def check(name: str, value: Any) -> None:
        if value not in allowed:
            raise ValueError(f"{name}={shown(value)} must be one of {', '.join(map(repr, allowed))}")

    return field(default=default, metadata={"check": check, **(metadata or {})})


def check_fields(record: Any) -> None:
    """Checks all fields of a dataclass. A subclass that only changes a default keeps the check of its base."""
    checks: dict[str, Check] = {}
    for kind in type(record).__mro__:
        for name, each in vars(kind).get("__dataclass_fields__", {}).items():
            if "check" in each.metadata:
                checks.setdefault(name, each.metadata["check"])
    for name in type(record).__dataclass_fields__:
        if name in checks:
            checks[name](name, getattr(record, name))
