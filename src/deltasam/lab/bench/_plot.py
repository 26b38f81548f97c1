"""Plots a step benchmark: time relative to SAM, time and memory, one bar for each method and way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltasam.lab.bench._clock import Spread
from deltasam.lab.bench.report import Report, Row

COLOURS = {"eager": "#3b82c4", "compiled": "#8b6cc9", "captured": "#2f9e5f", "compiled+captured": "#d9822b"}
THIRD_PARTY = "#8a8a8a"
GREY = "#777777"  # readable on light and dark pages
Value = Callable[[Row], "Spread | None"]


def plot(report: Report, path: Path) -> None:
    """Writes the plot. Values that were not measured have no panel.

    Args:
        report: The results.
        path: The file; its ending is the format: png, pdf or svg.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # Text stays text in an SVG file.
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "deltasam", **dict.fromkeys(names, GREY)}
    panels = {name: value for name, value in _panels(report).items() if any(value(row) for row in report.rows)}
    with rc_context(style):
        size = (2.2 + 2.6 * len(panels), 1.2 + 0.26 * len(report.rows))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for each, (name, value) in zip(axes, panels.items(), strict=True):
            _bars(each, report, name, value)
        axes[0].invert_yaxis()
        kinds = {_kind(row): _colour(row) for row in report.rows}
        patches = [Patch(color=colour, label=kind) for kind, colour in kinds.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
        figure.suptitle(_title(report), fontsize="medium")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True)


def _panels(report: Report) -> dict[str, Value]:
    def memory(row: Row) -> Spread | None:
        size = None if row.peak_bytes is None else row.peak_bytes / 2**20
        return None if size is None else Spread(size, size, size)

    if report.options.isolate:
        return {"time / deltasam's": lambda row: row.times_ours, "milliseconds": _milliseconds}
    return {"time / eager SAM's": lambda row: row.times_sam, "milliseconds": _milliseconds, "peak memory, MiB": memory}


def _bars(axes: Any, report: Report, name: str, value: Value) -> None:
    places = range(len(report.rows))
    found = [value(row) for row in report.rows]
    known = [(place, row, one) for place, row, one in zip(places, report.rows, found, strict=True) if one is not None]
    errors = [[one.median - one.low for *_, one in known], [one.high - one.median for *_, one in known]]
    axes.barh(
        [place for place, *_ in known],
        [one.median for *_, one in known],
        xerr=errors,
        color=[_colour(row) for _, row, _ in known],
        error_kw={"ecolor": GREY, "elinewidth": 1},
    )
    axes.set_yticks(list(places), [row.name for row in report.rows])
    axes.set_xlabel(name)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if "/" in name:
        axes.axvline(1, color=GREY, linewidth=0.8, linestyle=":")


def _milliseconds(row: Row) -> Spread:
    return Spread(*(1e3 * each for each in (row.seconds.median, row.seconds.low, row.seconds.high)))


def _kind(row: Row) -> str:
    return row.way if row.origin == "deltasam" else "other packages"


def _colour(row: Row) -> str:
    return COLOURS[row.way] if row.origin == "deltasam" else THIRD_PARTY


def _title(report: Report) -> str:
    options = report.options
    shape = "" if options.isolate else f", {options.batch} x {options.length}"
    return f"{options.shape}{shape}, {options.precision}, {report.machine['device']}"
