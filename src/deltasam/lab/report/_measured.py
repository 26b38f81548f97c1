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


def read_measurement(path: Path) -> dict[str, Any] | None:
    """Returns the content of one of the files in :data:`FORMS`, or None if it is missing, truncated or altered."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        return found if FORMS[path.name](found) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_number(value: Any) -> bool:
    """Whether a value fits into a float, finite or not. JSON allows integers of any length."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_number, values))


def _is_axis(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_finite, values)) and len(values) > 0


def _is_line(x: Any, loss: Any) -> bool:
    return _is_axis(x) and _are_numbers(loss) and len(x) == len(loss)


def _is_plane(x: Any, y: Any, loss: Any) -> bool:
    return _is_axis(y) and len(y) == len(loss) and all(_is_line(x, row) for row in loss)


def _is_risk(found: Any) -> bool:
    return _is_finite(found["value"]) and _is_finite(found.get("settings", {}).get("rho", 0.0))  # older: no settings


def _is_landscape(found: Any) -> bool:
    lines, planes = found["lines"].values(), found.get("planes", {}).values()
    return all(_is_line(line["x"], line["loss"]) for line in lines) and all(
        _is_plane(plane["x"], plane["y"], plane["loss"]) for plane in planes
    )


def _are_weights(found: Any) -> bool:
    wrong = found.get("wrong_labels", {"count": 0, "weight": 0.0, "others": 0.0})
    return (
        _are_numbers(found["weights"])
        and all(_is_finite(wrong[key]) for key in ("count", "weight", "others"))
        and all(
            _is_finite(example["weight"]) and _is_finite(example["rank"]) and "text" in example
            for example in found["examples"]
        )
    )


FORMS: dict[str, Callable[[Any], bool]] = {RISK: _is_risk, LANDSCAPE: _is_landscape, WEIGHTS: _are_weights}
"""Whether the content of each file has the expected form."""
