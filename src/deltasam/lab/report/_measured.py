"""Measurements in run folders. A file that does not have the form it was written in counts as not measured."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RISK = "adversarial-risk.json"
LANDSCAPE = "landscape.json"
WEIGHTS = "instance-weights.json"

Form = Callable[[Any], bool]
"""Whether a value has the form that is expected."""


def read_measurement(path: Path, kind: str) -> dict[str, Any] | None:
    """Returns a measurement of one of the :data:`FORMS`, or None if it is missing, truncated or altered."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and FORMS[kind](found) else None


def read_landscape(path: Path) -> dict[str, Any] | None:
    """Returns the content of a ``landscape.json``, or None if it is missing, truncated or altered."""
    return read_measurement(path, LANDSCAPE)


def is_number(value: Any) -> bool:
    """Whether a value fits into a float, finite or not. JSON allows integers of any length."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _list_of(form: Form) -> Form:
    return lambda values: isinstance(values, list) and all(map(form, values))


def _dict_of(form: Form) -> Form:
    return lambda values: isinstance(values, dict) and all(map(form, values.values()))


def _has(found: Any, /, **forms: Form) -> bool:
    return isinstance(found, dict) and all(form(found.get(name)) for name, form in forms.items())


def _is_axis(values: Any) -> bool:
    return _list_of(_is_finite)(values) and len(values) > 0


def _is_line(line: Any) -> bool:
    return _has(line, x=_is_axis, loss=_list_of(is_number)) and len(line["x"]) == len(line["loss"])


def _is_plane(plane: Any) -> bool:
    fits = _has(plane, x=_is_axis, y=_is_axis, loss=_list_of(_list_of(is_number)))
    return fits and [len(row) for row in plane["loss"]] == [len(plane["x"])] * len(plane["y"])


def _is_example(example: Any) -> bool:
    return _has(example, weight=_is_finite, rank=_is_finite) and "text" in example


def _is_risk(found: Any) -> bool:
    settings = found.get("settings", {})  # older files have none
    return _has(found, value=_is_finite) and isinstance(settings, dict) and _is_finite(settings.get("rho", 0.0))


def _is_landscape(found: Any) -> bool:
    return _has(found, lines=_dict_of(_is_line)) and _dict_of(_is_plane)(found.get("planes", {}))


def _are_weights(found: Any) -> bool:
    return _has(found, weights=_list_of(is_number), examples=_list_of(_is_example))


FORMS: dict[str, Form] = {RISK: _is_risk, LANDSCAPE: _is_landscape, WEIGHTS: _are_weights}
"""The form of each measurement."""
