"""How time and memory grow over instances, tokens and parameters: one table and one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from deltasam.lab.pages.figures import BLUE, GREEN, GREY, ORANGE, STYLE, panels, svg
from deltasam.lab.pages.speed import (
    DELTA,
    NOTHING,
    OURS,
    Columns,
    Record,
    measured,
    memory_ratio,
    ms,
    ratio,
    row_of,
    times,
)
from deltasam.lab.pages.statistics import table

AXES: dict[str, tuple[str, dict[str, Any], Callable[[Record], float]]] = {
    "instances": ("instances N", {"model": "bert-base", "length": 64}, lambda r: r["options"]["batch"]),
    "tokens": ("tokens T", {"model": "bert-base", "batch": 16}, lambda r: r["options"]["length"]),
    "parameters": (
        "million parameters",
        {"batch": 16, "length": 64},
        lambda r: int(r["machine"]["parameters"]) / 1e6,
    ),
}
"""Name -> heading, the options that the measurements share, the place of a measurement."""
COLOURS = {"ERM": GREY, "SAM": BLUE, DELTA: ORANGE, OURS: GREEN}


def _memory(record: Record) -> str:
    found = memory_ratio(record, f"{OURS} captured", "SAM captured", total=True)
    return "-" if found is None else f"{found:.2f}"


def _per_token(record: Record) -> str:
    row, options = row_of(record, f"{OURS} captured"), record["options"]
    return "-" if row is None else f"{row['seconds']['median'] * 1e6 / (options['batch'] * options['length']):.1f}"


def _forms(record: Record) -> str:
    forms = record.get("engine")
    return f"{forms['low-rank']} + {forms['materialised']}" if forms else "-"


COLUMNS: Columns = {
    "ERM, ms": ms("ERM captured"),
    "SAM, ms": ms("SAM captured"),
    "delta-SAM / SAM": times(f"{DELTA} captured", "SAM captured"),
    "per-instance / SAM": times(f"{OURS} captured", "SAM captured"),
    "per-instance, µs per token": _per_token,
    "eager: per-instance / SAM": times(OURS, "SAM"),
    "memory: per-instance / SAM": _memory,
    "low rank + full matrix": _forms,
}


def on_axis(results: Path, axis: str) -> list[Record]:
    """The measurements of an axis, in order."""
    _, shared, place = AXES[axis]
    records = [r for r in measured(results, "growth") if {name: r["options"][name] for name in shared} == shared]
    return sorted(records, key=place)


def growth(results: Path) -> str:
    """A row for every measurement of every axis."""
    rows = [
        [heading, f"{place(record):,.0f}", *(cell(record) for cell in COLUMNS.values())]
        for axis, (heading, _, place) in AXES.items()
        for record in on_axis(results, axis)
    ]
    return table(["along", "", *COLUMNS], rows) if rows else NOTHING


def _line(axes: Any, places: Sequence[float], values: Sequence[float | None], line: str = "-", **look: Any) -> None:
    """Draws the points that were measured."""
    known = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
    axes.plot([x for x, _ in known], [y for _, y in known], line, marker="o", markersize=4, **look)


def _draw(results: Path, axis: str, above: Any, below: Any) -> dict[str, Any]:
    """Draws the time of captured steps, and the ratios to SAM, captured and eager."""
    found, (xlabel, _, place) = on_axis(results, axis), AXES[axis]
    places = [place(record) for record in found]
    drawn: dict[str, Any] = {"places": places}
    for method, colour in COLOURS.items():
        rows = [row_of(record, f"{method} captured") for record in found]
        drawn[method] = [None if row is None else row["seconds"]["median"] * 1e3 for row in rows]
        _line(above, places, drawn[method], color=colour, label=method)
        for way, line in ((" captured", "-"), ("", "--")) if method not in ("ERM", "SAM") else ():
            key = f"{method}{way} / SAM{way}"
            both = [ratio(record, f"{method}{way}", f"SAM{way}") for record in found]
            drawn[key] = [None if each is None else each[0] for each in both]
            _line(below, places, drawn[key], line, color=colour)
    above.set(yscale="log")
    above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_locator(NullLocator())
    for each in (above, below):
        each.set(xscale="log", xlabel=xlabel)
        each.set_xticks(places, [f"{place:.0f}" for place in places])
        each.xaxis.set_minor_locator(NullLocator())
        each.spines[["top", "right"]].set_visible(False)
    return drawn


@rc_context(STYLE)
def axis_figure(results: Path, axis: str) -> str:
    """Time of a captured step, and its ratio to SAM's, captured and eager, along an axis."""
    left, right = panels(2, (8.4, 3.4))
    drawn = _draw(results, axis, left, right)
    left.set(title="captured step, ms")
    right.set(title="time / SAM's (dashed: eager)")
    left.figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return svg(left.figure, drawn)


@rc_context(STYLE)
def figure(results: Path) -> str:
    """The three axes: time of a captured step above, ratio to SAM's below."""
    whole = Figure(figsize=(9.6, 5.6), layout="constrained")
    grid = whole.subplots(2, len(AXES), squeeze=False)
    drawn = {axis: _draw(results, axis, *grid[:, column]) for column, axis in enumerate(AXES)}
    for each in grid.flatten():
        each.tick_params(axis="x", labelsize=7)
    grid[0, 0].set(ylabel="captured step, ms")
    grid[1, 0].set(ylabel="time / SAM's (dashed: eager)")
    whole.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return svg(whole, drawn)
