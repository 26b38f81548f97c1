"""Plots a step benchmark: time relative to SAM or plain LoRA, time and memory, one bar per method and way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltasam.lab.bench._clock import Spread
from deltasam.lab.bench.report import Report, Row

COLOURS = {
    "eager": "#3b82c4", "compiled": "#8b6cc9", "captured": "#2f9e5f", "compiled+captured": "#d9822b",
    "other packages": "#8a8a8a",
}  # fmt: skip
GREY = "#777777"  # readable on light and dark pages


def plot(report: Report, path: Path) -> None:
    """Writes the plot. Values that were not measured have no panel.

    Args:
        report: The results.
        path: The file; its ending is the format: png, pdf or svg.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    options, rows = report.options, report.rows
    shape = "" if options.isolate else f", {options.batch} x {options.length}"
    panels: dict[str, list[Spread | None]] = {
        "time / deltasam's": [row.times_ours for row in rows],
        "time / eager SAM's": [row.times_sam for row in rows],
        "time / plain LoRA's": [row.times_plain for row in rows],
        "milliseconds": [_scaled(row.seconds, 1e3) for row in rows],
        "peak memory, MiB": [None if row.peak_bytes is None else Spread.of([row.peak_bytes / 2**20]) for row in rows],
    }
    shown = {name: values for name, values in panels.items() if any(values)}
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    # Text stays text in an SVG file.
    style: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "deltasam", **dict.fromkeys(names, GREY)}
    with rc_context(style):
        size = (2.2 + 2.6 * len(shown), 1.2 + 0.26 * len(rows))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for each, (name, values) in zip(axes, shown.items(), strict=True):
            _bars(each, rows, name, values)
        axes[0].invert_yaxis()
        patches = [Patch(color=COLOURS[kind], label=kind) for kind in dict.fromkeys(map(_kind, rows))]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
        title = f"{options.shape}{shape}, {options.precision}, {report.machine['device']}"
        figure.suptitle(title, fontsize="medium")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True)


def _bars(axes: Any, rows: tuple[Row, ...], name: str, values: list[Spread | None]) -> None:
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        if value is not None:
            error = [[value.median - value.low], [value.high - value.median]]
            look = {"ecolor": GREY, "elinewidth": 1}
            axes.barh(place, value.median, xerr=error, color=COLOURS[_kind(row)], error_kw=look)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_xlabel(name)
    axes.spines[["top", "right"]].set_visible(False)
    if "/" in name:
        axes.axvline(1, color=GREY, linewidth=0.8, linestyle=":")


def _scaled(spread: Spread, factor: float) -> Spread:
    return Spread(factor * spread.median, factor * spread.low, factor * spread.high)


def _kind(row: Row) -> str:
    return row.way if row.origin == "deltasam" else "other packages"
