"""Measurements in run folders. A file that does not have the form it was written in counts as not measured."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RISK = "adversarial-risk.json"
LANDSCAPE = "landscape.json"
WEIGHTS = "instance-weights.json"


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file, or None if there is no such file or it holds no object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_landscape(path: Path) -> dict[str, Any] | None:
    """Returns the content of a ``landscape.json``, or None if it is missing, truncated or altered."""
    return landscape_in(read_json(path))


def risk_in(found: Any) -> dict[str, Any] | None:
    """Returns a risk if it is a finite number. Its settings are empty where the file has none."""
    if not isinstance(found, Mapping) or not _is_finite(found.get("value")):
        return None
    settings = found.get("settings", {})
    if not isinstance(settings, Mapping) or not _is_finite(settings.get("rho", 0.0)):
        return None
    return {**found, "settings": settings}


def landscape_in(found: Any) -> dict[str, Any] | None:
    """Returns a landscape if its axes and losses are numbers of matching shapes. The losses need not be finite."""
    if not isinstance(found, Mapping):
        return None
    lines, planes = found.get("lines"), found.get("planes", {})
    if not isinstance(lines, Mapping) or not isinstance(planes, Mapping):
        return None
    return dict(found) if all(map(_is_line, lines.values())) and all(map(_is_plane, planes.values())) else None


def weights_in(found: Any) -> dict[str, Any] | None:
    """Returns instance weights if the weights and the examples are complete."""
    if not isinstance(found, Mapping) or not _are_numbers(found.get("weights")):
        return None
    examples = found.get("examples")
    return dict(found) if isinstance(examples, Sequence) and all(map(_is_example, examples)) else None


READERS = {RISK: risk_in, LANDSCAPE: landscape_in, WEIGHTS: weights_in}
"""The reader of each measurement."""


def is_number(value: Any) -> bool:
    """Whether a value fits into a float, finite or not. JSON allows integers of any length."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(map(is_number, values))


def _is_axis(values: Any) -> bool:
    return _are_numbers(values) and len(values) > 0 and all(map(math.isfinite, values))


def _is_line(line: Any) -> bool:
    if not isinstance(line, Mapping) or not (_is_axis(line.get("x")) and _are_numbers(line.get("loss"))):
        return False
    return len(line["x"]) == len(line["loss"])


def _is_plane(plane: Any) -> bool:
    if not isinstance(plane, Mapping) or not (_is_axis(plane.get("x")) and _is_axis(plane.get("y"))):
        return False
    rows = plane.get("loss")
    if not isinstance(rows, Sequence) or not all(map(_are_numbers, rows)):
        return False
    return len(rows) == len(plane["y"]) and all(len(row) == len(plane["x"]) for row in rows)


def _is_example(example: Any) -> bool:
    return (
        isinstance(example, Mapping)
        and all(map(_is_finite, map(example.get, ("weight", "rank"))))
        and "text" in example
    )
