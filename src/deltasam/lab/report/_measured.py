"""Measurements that lie in run folders: each is of the form it was written in, or counts as not made."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasam.lab.report._runs import Run

RISK = "adversarial-risk.json"
LANDSCAPE = "landscape.json"
WEIGHTS = "instance-weights.json"


def broken(runs: Iterable[Run], *names: str) -> list[str]:
    """One sentence for each kind of measurement that is there but cannot be read; all kinds by default."""
    found: dict[str, list[Path]] = {}
    for run in runs:
        for name in names or _READERS:
            if (run.path / "analysis" / name).is_file() and _READERS[name](run.analysis(name)) is None:
                found.setdefault(name, []).append(run.path)
    return [f"{name} is cut short or altered, taken as not measured: {listed(p)}." for name, p in found.items()]


def listed(paths: Sequence[Path]) -> str:
    """The names of a few folders, and how many more there are."""
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(path.name for path in paths[:3]) + more


def risk_in(found: Any) -> dict[str, Any] | None:
    """What ``adversarial-risk.json`` holds, if it is a finite number; its settings are empty where it has none."""
    if not isinstance(found, Mapping) or not _is_number(found.get("value")):
        return None
    settings = found.get("settings", {})
    if not isinstance(settings, Mapping) or not _is_number(settings.get("rho", 0.0)):
        return None
    return {**found, "settings": settings}


def landscape_in(found: Any) -> dict[str, Any] | None:
    """What ``landscape.json`` holds, if its slices are lists of numbers that belong together."""
    if not isinstance(found, Mapping):
        return None
    lines, planes = found.get("lines"), found.get("planes", {})
    if not isinstance(lines, Mapping) or not isinstance(planes, Mapping):
        return None
    sound = all(map(_is_line, lines.values())) and all(map(_is_plane, planes.values()))
    return dict(found) if sound else None


def read_landscape(path: Path) -> dict[str, Any] | None:
    """What a ``landscape.json`` holds, or None where there is none, or where it is cut short or altered."""
    try:
        return landscape_in(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return None


def weights_in(found: Any) -> dict[str, Any] | None:
    """What ``instance-weights.json`` holds, if it has the weights and the examples whole."""
    if not isinstance(found, Mapping) or not isinstance(found.get("examples"), Sequence):
        return None
    sound = _are_numbers(found.get("weights")) and all(map(_is_example, found["examples"]))
    return dict(found) if sound else None


def _is_line(line: Any) -> bool:
    if not isinstance(line, Mapping) or not (_are_places(line.get("x")) and _are_numbers(line.get("loss"))):
        return False
    return len(line["x"]) == len(line["loss"])


def _is_plane(plane: Any) -> bool:
    if not isinstance(plane, Mapping) or not (_are_places(plane.get("x")) and _are_places(plane.get("y"))):
        return False
    rows = plane.get("loss")
    if not isinstance(rows, Sequence) or not all(map(_are_numbers, rows)):
        return False
    return len(rows) == len(plane["y"]) and all(len(row) == len(plane["x"]) for row in rows)


def _is_example(example: Any) -> bool:
    return (
        isinstance(example, Mapping)
        and _is_number(example.get("weight"))
        and _is_number(example.get("rank"))
        and "text" in example
    )


def _are_places(values: Any) -> bool:
    """Whether these are where something was measured; what was measured there need not be finite."""
    return _are_numbers(values) and len(values) > 0 and all(map(math.isfinite, values))


def _are_numbers(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(map(is_float, values))


def _is_number(value: Any) -> bool:
    return is_float(value) and math.isfinite(value)


def is_float(value: Any) -> bool:
    """Whether this is a number that a float can be, if not finite; JSON has integers of any length."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


_READERS = {RISK: risk_in, LANDSCAPE: landscape_in, WEIGHTS: weights_in}
