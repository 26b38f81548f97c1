"""The measurements in ``results/speed``: records, ratios of steps, and tables with a row for every measurement."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from deltasam.lab.pages.measurements import loaded
from deltasam.lab.pages.statistics import table

Record = dict[str, Any]
Columns = Mapping[str, Callable[[Record], str]]
"""Heading -> cell of a measurement."""

SLOW, OURS, DELTA = "PerInstanceSAM-loop", "PerInstanceSAM", "DeltaSAM-ambient"
NOTHING = "Not measured yet."


@lru_cache
def measured(results: Path, part: str) -> list[Record]:
    """The measurements of a part that did not fail."""
    return [record for record in loaded(results / "speed" / part) if "failed" not in record]


def row_of(record: Record, name: str) -> Record | None:
    """One step of a measurement."""
    return next((row for row in record["rows"] if row["name"] == name), None)


def ratio(record: Record, above: str, below: str) -> tuple[float, float] | None:
    """Median of the ratios within the rounds, and half the distance between the quartiles."""
    a, b = row_of(record, above), row_of(record, below)
    if a is None or b is None:
        return None
    values = [x / y for x, y in zip(a["rounds"], b["rounds"], strict=True)]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return median, (high - low) / 2


def memory_ratio(record: Record, above: str, below: str, *, total: bool) -> float | None:
    """Ratio of the peak memory; the total has the weights and AdamW's two moments, three copies of the parameters."""
    a, b = ((row_of(record, name) or {}).get("peak_bytes") for name in (above, below))
    more = 3 * int(record["machine"]["parameter_bytes"]) if total else 0
    return None if a is None or b is None else float((a + more) / (b + more))


def marked(found: tuple[float, float | None] | None, target: float | None, *, at_least: bool = False) -> str:
    """A ratio, its spread, and whether it keeps to the target when rounded to two digits."""
    if found is None:
        return "-"
    value, spread = found
    kept = target is not None and (round(value, 2) >= target if at_least else round(value, 2) <= target)
    mark = "" if target is None else " ✓" if kept else " ✗"
    return f"{value:.2f}{'' if spread is None else f' ±{spread:.2f}'}{mark}"


def shape(record: Record) -> tuple[str, str, str]:
    """Model, size and precision."""
    options = record["options"]
    return options["model"], f"{options['batch']} x {options['length']}", options["precision"]


def ms(name: str) -> Callable[[Record], str]:
    """The median time of a step."""
    return lambda r: "-" if (row := row_of(r, name)) is None else f"{row['seconds']['median'] * 1e3:.1f}"


def times(above: str, below: str, target: float | None = None, *, at_least: bool = False) -> Callable[[Record], str]:
    """The ratio of two steps; with its mark if there is a target."""

    def cell(record: Record) -> str:
        found = ratio(record, above, below)
        return marked(None if found is None else (found[0], None), target, at_least=at_least)

    return cell


def by_measurement(records: Sequence[Record], columns: Columns) -> str:
    """A row for every measurement."""
    if not records:
        return NOTHING
    return table(list(columns), [[cell(record) for cell in columns.values()] for record in records])
