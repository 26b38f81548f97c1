"""Figures as SVG that is readable on light and dark pages and the same in every run."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from deltasam.lab.pages.statistics import (
    Ends,
    Label,
    Pairs,
    mean_and_ends,
    pooled_differences,
    series,
    stratified_interval,
    without_cola,
)  # fmt: skip
from deltasam.lab.report import method_name

GREY = "#777777"  # readable on light and dark pages
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#d55e00", "#009e73", "#b5532a", "#a35c8a", "#56b4e9"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY)
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "deltasam", "font.size": 10, "font.family": "sans-serif",
    "axes.titlesize": "medium",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
}  # fmt: skip

_drawn: ContextVar[bool] = ContextVar("_drawn", default=True)


@contextmanager
def not_drawn() -> Iterator[None]:
    """Within it, the text of a figure is the digest of its data alone, which takes less time than to draw it."""
    token = _drawn.set(False)
    try:
        yield
    finally:
        _drawn.reset(token)


def panels(count: int, size: tuple[float, float]) -> Sequence[Any]:
    """Empty axes, two in a row, of a figure of this size in inches."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(-(-count // 2), min(count, 2), squeeze=False).flatten()
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return list(axes)


def share(axes: Sequence[Any], axis: Literal["x", "y"]) -> None:
    """Gives both panels of each row the same x or y axis."""
    for left, right in zip(axes[::2], axes[1::2], strict=False):
        getattr(left, f"share{axis}")(right)
        left.autoscale(axis=axis)


def svg(figure: Figure, drawn: Any) -> str:
    """The text of the file. It contains a digest of the data, to compare figures of different platforms."""
    # Rounded: the last digits differ between platforms, and 0 on one may be 1e-16 on another.
    rounded = json.loads(json.dumps(drawn), parse_float=lambda text: f"{round(float(text), 9) + 0.0:.6g}")
    description = f"data {hashlib.sha256(json.dumps(rounded).encode()).hexdigest()}"
    if not _drawn.get():
        return description
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Description": description})
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


@rc_context(STYLE)
def forest(parts: Mapping[str, Mapping[str, Ends]], xlabel: str, *, share_rows: bool = False) -> str:
    """Differences with their intervals: a panel for each title, a line for each name.

    ``share_rows``: one x axis for both panels of a row.
    """
    names = list(dict.fromkeys(name for values in parts.values() for name in values))
    axes = panels(len(parts), (8.4, -(-len(parts) // 2) * (0.8 + 0.2 * len(names))))
    for number, (each, (title, values)) in enumerate(zip(axes, parts.items(), strict=True)):
        for name, (mean, low, high) in values.items():
            colour, place = GREEN if low > 0 else ORANGE if high < 0 else GREY, -names.index(name)
            each.plot([low, high], [place, place], color=colour, linewidth=1.5)
            each.plot(mean, place, "o", color=colour, markersize=4)
        each.axvline(0, color=GREY, linewidth=0.8, zorder=0)
        each.set_yticks([-place for place in range(len(names))], names if number % 2 == 0 else [""] * len(names))
        each.set(title=title, xlabel=xlabel)
    if share_rows:
        share(axes, "x")
    return svg(axes[0].figure, parts)


@rc_context(STYLE)
def points(parts: Mapping[str, pd.DataFrame], xlabel: str, label: Label = method_name) -> str:
    """Means with their intervals: a panel for each frame, a colour for each row, a group for each column."""
    rows = list(dict.fromkeys(row for frame in parts.values() for row in frame["row"]))
    places = list(dict.fromkeys(column for frame in parts.values() for column in frame["column"]))
    colours = {row: GREY if row == "ERM" else CYCLE[n % len(CYCLE)] for n, row in enumerate(rows)}
    axes, drawn = panels(len(parts), (8.4, 3.8)), []
    for each, (title, frame) in zip(axes, parts.items(), strict=True):
        for (row, column), values in series(frame).items():
            mean, low, high = mean_and_ends(values)
            at = places.index(column) + 0.14 * (rows.index(row) - (len(rows) - 1) / 2)
            each.plot([at, at], [low, high], color=colours[row], linewidth=1.5)
            each.plot(at, mean, "o", color=colours[row], markersize=4)
            drawn.append((title, row, column, mean, low, high))
        if each.get_ylim()[0] < 0:
            each.axhline(0, color=GREY, linewidth=0.5, zorder=0)
        each.set_xticks(range(len(places)), [re.sub("[^0-9.]", "", place) for place in places])
        each.set(title=title, xlabel=xlabel)
    handles = [Line2D([], [], marker="o", linestyle="", label=label(row), color=colours[row]) for row in rows]
    axes[0].figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return svg(axes[0].figure, drawn)


def above(frame: pd.DataFrame, second: str) -> pd.DataFrame:
    """The differences to the second method, paired by unit."""
    base = frame[frame["row"] == second].set_index(["column", "unit"])["value"]
    others = frame[frame["row"] != second].set_index(["column", "unit"])
    return others.assign(value=others["value"].sub(base.reindex(others.index))).dropna().reset_index()


def above_plain(frame: pd.DataFrame) -> str:
    """The differences to plain training, a panel for each task."""
    parts: dict[str, dict[str, Ends]] = {column: {} for column in frame["column"].unique()}
    for (row, column), values in series(above(frame, "ERM")).items():
        parts[column][method_name(row)] = mean_and_ends(values)
    return forest(parts, "points above plain training")


def pooled(frame: pd.DataFrame, pairs: Pairs) -> str:
    """The differences over all tasks, and over all tasks except CoLA."""
    found = {f"{method_name(a)} - {method_name(b)}": at for (a, b), at in pooled_differences(frame, pairs).items()}
    every = {name: stratified_interval(at) for name, at in found.items()}
    others = {name: stratified_interval(without_cola(at)) for name, at in found.items()}
    return forest({"all tasks": every, "without CoLA": others}, "points")


def radii(frame: pd.DataFrame) -> str:
    """Scores on CoLA at every radius, and the difference to SAM at the same radius."""
    to_sam = above(frame[frame["row"] != "ERM"], "SAM")
    return points({"Matthews correlation, times 100": frame, "points above SAM at the same radius": to_sam}, "rho")


def weights(frame: pd.DataFrame, label: Label) -> str:
    """Rank correlation of the weights in float32 with float64, and of one direction with another, over training."""
    parts = frame["row"].str.split(" | ", regex=False, expand=True)
    frame = frame.assign(row=parts[0])
    shown = {
        "Rank correlation, float32 with float64": frame[parts[1] == "float32"],
        "Rank correlation, one direction with another": frame[parts[1] == "another direction"],
    }
    return points(shown, "updates", label)


@rc_context(STYLE)
def arrival(results: Path) -> str:
    """The rise of the loss under bfloat16 as a share of the rise in float32: along a training, and frozen weights."""
    read = {
        name: json.loads((results / "rounding" / f"{name}.json").read_bytes())["points"]
        for name in ("arrives-before", "arrives-after", "smollm2")
    }
    looks = {"rounded to nearest": (ORANGE, "o"), "rounded stochastically (deltasam)": (BLUE, "s")}
    sources = {"bf16": "bf16", "fp16": "fp16", "file": "4-bit", "off the grid": "off grid"}
    (left, right), drawn = panels(2, (8.4, 3.5)), []
    for name, (colour, marker) in zip(("arrives-before", "arrives-after"), looks.values(), strict=True):
        for rho, line in ((0.003, "-"), (0.01, "--")):
            found = [p for p in read[name] if p["precision"] == "bf16" and p["rho"] == rho]
            updates, shares = [p["updates"] for p in found], [p["share"] for p in found]
            left.plot(updates, shares, line, color=colour, marker=marker, markersize=4, linewidth=1.5)
            drawn += [updates, shares]
    left.set_xscale("symlog", linthresh=1, linscale=0.5)
    left.set_xticks(updates, [str(update) for update in updates])
    left.set_xticks([], minor=True)
    left.set(xlabel="updates since the float16 checkpoint", ylabel="rise of the loss / rise in float32")
    left.set(title="bert-small-wiki, all weights trained", ylim=(0, None))
    styles = [
        Line2D([], [], color=GREY, linestyle=line, label=f"ρ = {rho}") for rho, line in ((0.003, "-"), (0.01, "--"))
    ]
    left.legend(handles=styles, frameon=False, loc="upper right")
    share = {(p["weights"], p["way"]): p["share"] for p in read["smollm2"] if p["rho"] == 0.003}
    for aside, way, (colour, marker) in zip((-0.12, 0.12), ("nearest", "deltasam"), looks.values(), strict=True):
        for place, source in enumerate(sources):
            value = share[source, way]
            up = value > 1 and way == "nearest"
            right.plot([place + aside] * 2, [1, value], color=colour, linewidth=1.5)
            right.plot(place + aside, value, color=colour, marker=marker, markersize=6)
            number = f"{value:.0f}" if value >= 10 else f"{value:.2f}"
            right.annotate(number, (place + aside, value), (0, 6 if up else -6), textcoords="offset points",
                           ha="center", va="bottom" if up else "top", color=colour, fontsize="small")  # fmt: skip
            drawn.append(value)
    right.set(yscale="log", ylim=(0.1, 3 * max(share.values())), xlim=(-0.5, len(sources) - 0.5))
    right.yaxis.set_major_formatter("{x:g}")
    right.set_xticks(range(len(sources)), list(sources.values()))
    right.set(xlabel="origin of the weights", title="SmolLM2-135M, frozen weights, ρ = 0.003")
    for each in (left, right):
        each.axhline(1, color=GREY, linewidth=0.8, zorder=0)
    handles = [Line2D([], [], color=colour, marker=m, label=name) for name, (colour, m) in looks.items()]
    left.figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return svg(left.figure, drawn)
