"""Figures as SVG that is readable on light and dark pages and the same in every run."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from deltasam.lab.pages import speed
from deltasam.lab.pages.statistics import Ends, Pairs, difference, mean_and_ends, pooled_differences, series
from deltasam.lab.pages.statistics import stratified_interval, without_cola
from deltasam.report import method_name

GREY = "#777777"  # readable on light and dark pages
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#d55e00", "#009e73", "#b5532a", "#a35c8a", "#56b4e9"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY)
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "deltasam", "font.size": 10, "font.family": "sans-serif",
    "axes.titlesize": "medium",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
}  # fmt: skip


def draw(panels: int, size: tuple[float, float], fill: Callable[[Sequence[Any]], Any], across: int = 2) -> str:
    """An SVG with so many panels.

    Args:
        panels: How many.
        size: Of the whole figure, in inches.
        fill: Draws into the axes, and returns what it drew. A digest of that is stored in the file, so that two files
            of different versions of matplotlib can be compared.
        across: Panels in a row.

    Returns:
        The text of the file.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(-(-panels // across), across, squeeze=False).flatten()
        drawn = fill(axes)
        for each in axes:
            each.spines[["top", "right"]].set_visible(False)
        digest = hashlib.sha256(json.dumps(drawn, default=lambda value: f"{value:.9g}").encode()).hexdigest()
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Description": f"data {digest}"})
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def rounded(found: Mapping[str, Any]) -> list[Any]:
    """Numbers as they are compared: nine digits."""
    return json.loads(json.dumps([*found.items()]), parse_float=lambda text: f"{float(text):.9g}")


def forest(panels: Mapping[str, Mapping[str, Ends]], xlabel: str) -> str:
    """Differences with their intervals: a panel for each title, a line for each name."""
    names = list(dict.fromkeys(name for values in panels.values() for name in values))

    def fill(axes: Sequence[Any]) -> Any:
        for number, (each, (title, values)) in enumerate(zip(axes, panels.items(), strict=True)):
            for place, name in enumerate(reversed(names)):
                if name in values:
                    mean, low, high = values[name]
                    colour = GREEN if low > 0 else ORANGE if high < 0 else GREY
                    each.plot([low, high], [place, place], color=colour, linewidth=1.5)
                    each.plot(mean, place, "o", color=colour, markersize=4)
            each.axvline(0, color=GREY, linewidth=0.8, zorder=0)
            each.set_yticks(range(len(names)), list(reversed(names)) if number % 2 == 0 else [])
            each.set(title=title, xlabel=xlabel, ylim=(-0.7, len(names) - 0.3))
        return rounded(panels)

    rows = -(-len(panels) // 2)
    return draw(len(panels), (8.4, rows * (0.8 + 0.2 * len(names))), fill)


def points(panels: Mapping[str, Mapping[str, Sequence[Ends | None]]], places: Sequence[str], xlabel: str) -> str:
    """Values with their intervals: a panel for each title, a colour for each name, a group for each place."""
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))

    def fill(axes: Sequence[Any]) -> Any:
        for each, (title, lines) in zip(axes, panels.items(), strict=True):
            for number, (name, values) in enumerate(lines.items()):
                colour = GREY if name == "ERM" else CYCLE[names.index(name) % len(CYCLE)]
                for place, value in enumerate(values):
                    if value is not None:
                        at = place + 0.14 * (number - (len(lines) - 1) / 2)
                        each.plot([at, at], value[1:], color=colour, linewidth=1.5)
                        each.plot(at, value[0], "o", color=colour, markersize=4)
            each.axhline(0, color=GREY, linewidth=0.5, zorder=0) if min(each.get_ylim()) < 0 else None
            each.set_xticks(range(len(places)), places)
            each.set(title=title, xlabel=xlabel)
        handles = [Line2D([], [], marker="o", linestyle="", label=name,
                          color=GREY if name == "ERM" else CYCLE[n % len(CYCLE)]) for n, name in enumerate(names)]  # fmt: skip
        axes[0].figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        return rounded(panels)

    return draw(len(panels), (8.4, 3.8), fill)


def growth(results: Path, axis: str) -> str:
    """Time of a captured step, and its ratio to SAM's, captured and eager, along an axis."""
    colours = {"ERM": GREY, "SAM": BLUE, "DeltaSAM-ambient": ORANGE, "PerInstanceSAM": GREEN}
    found = speed.on_axis(results, axis)
    places = [place for place, _ in found]

    def fill(axes: Sequence[Any]) -> Any:
        drawn: dict[str, Any] = {}
        for method, colour in colours.items():
            rows = [speed.row_of(record, f"{method} captured") or {} for _, record in found]
            drawn[method] = [row["seconds"]["median"] * 1e3 for row in rows]
            axes[0].plot(places, drawn[method], marker="o", markersize=4, color=colour, label=method)
            for way, line in ((" captured", "-"), ("", "--")):
                if method in ("DeltaSAM-ambient", "PerInstanceSAM"):
                    both = [speed.ratio(record, f"{method}{way}", f"SAM{way}") for _, record in found]
                    drawn[method + way + line] = [pair[0] for pair in both if pair is not None]
                    axes[1].plot(places, drawn[method + way + line], line, marker="o", markersize=4, color=colour)
        axes[0].set(title="captured step, ms", yscale="log")
        axes[1].set(title="time / SAM's (dashed: eager)")
        for each in axes:
            each.set(xscale="log", xlabel=speed.AXES[axis][0])
            each.set_xticks(places, [f"{place:.0f}" for place in places])
            each.set_xticks([], minor=True)
        axes[0].yaxis.set_major_formatter("{x:g}")
        axes[0].yaxis.set_minor_formatter("{x:g}")
        axes[0].figure.legend(loc="outside lower center", ncols=4, frameon=False)
        return rounded(drawn)

    return draw(2, (8.4, 3.4), fill)


def above(frame: pd.DataFrame, second: str, label: Callable[[str], str] = method_name) -> dict[str, dict[str, Ends]]:
    """Column -> method -> difference to the second method."""
    cells, methods = series(frame), list(frame["row"].unique())
    return {
        column: {
            label(row): mean_and_ends(values)
            for row in methods
            if row != second and (values := difference(cells, row, second, column))
        }
        for column in frame["column"].unique()
    }


def pooled(frame: pd.DataFrame, pairs: Pairs) -> str:
    """The differences over all tasks, and over all tasks except CoLA."""
    found = {f"{method_name(a)} - {method_name(b)}": at for (a, b), at in pooled_differences(frame, pairs).items()}
    panels = {
        "all tasks": {name: stratified_interval(at) for name, at in found.items()},
        "without CoLA": {name: stratified_interval(without_cola(at)) for name, at in found.items()},
    }
    return forest(panels, "points")


def radii(frame: pd.DataFrame) -> str:
    """Scores on CoLA at every radius, and the difference to SAM at the same radius."""
    cells, columns = series(frame), list(frame["column"].unique())
    places = ["0", *(column.removeprefix("rho = ") for column in columns)]
    scores: dict[str, list[Ends | None]] = {"ERM": [mean_and_ends(cells["ERM", columns[0]]), *[None] * len(columns)]}
    to_sam: dict[str, list[Ends | None]] = {}
    for row in [row for row in frame["row"].unique() if row != "ERM"]:
        scores[method_name(row)] = [
            None, *(mean_and_ends(cells[row, c]) if (row, c) in cells else None for c in columns)
        ]  # fmt: skip
        if row != "SAM":
            both = [difference(cells, row, "SAM", c) for c in columns]
            to_sam[method_name(row)] = [None, *(mean_and_ends(values) if values else None for values in both)]
    return points(
        {"Matthews correlation, times 100": scores, "points above SAM at the same radius": to_sam}, places, "rho"
    )


def weights(frame: pd.DataFrame, label: Callable[[str], str]) -> str:
    """Rank correlation of the weights in float32 with float64, and of one direction with another, over training."""
    cells, columns = series(frame), list(frame["column"].unique())
    panels: dict[str, dict[str, list[Ends | None]]] = {}
    for title, condition in (("float32 with float64", "float32"), ("one direction with another", "another direction")):
        rows = [row for row in frame["row"].unique() if row.endswith(f"| {condition}")]
        panels[f"Rank correlation, {title}"] = {
            label(row.partition(" | ")[0]): [
                mean_and_ends(cells[row, c]) if (row, c) in cells else None for c in columns
            ]
            for row in rows
        }
    return points(panels, [column.removesuffix(" updates") for column in columns], "updates")


def arrival(results: Path) -> str:
    """How far the loss rises under bfloat16, as a share of the rise in float32: along a training, and frozen weights."""
    read = {
        name: json.loads((results / "rounding" / f"{name}.json").read_bytes())["points"]
        for name in ("arrives-before", "arrives-after", "smollm2")
    }
    looks = {"rounded to nearest": (ORANGE, "o"), "rounded stochastically (deltasam)": (BLUE, "s")}
    sources = {"bf16": "bf16", "fp16": "fp16", "file": "4-bit", "off the grid": "off grid"}

    def fill(axes: Sequence[Any]) -> Any:
        left, right = axes
        drawn: list[Any] = []
        for name, (colour, marker) in zip(("arrives-before", "arrives-after"), looks.values(), strict=True):
            for rho, line in ((0.003, "-"), (0.01, "--")):
                found = [p for p in read[name] if p["precision"] == "bf16" and p["rho"] == rho]
                updates, shares = [p["updates"] for p in found], [p["share"] for p in found]
                left.plot(updates, shares, line, color=colour, marker=marker, markersize=4, linewidth=1.5)
                drawn.append(shares)
        left.set_xscale("symlog", linthresh=1, linscale=0.5)
        left.set_xticks(updates, [str(update) for update in updates])
        left.set_xticks([], minor=True)
        left.set(xlabel="updates since the float16 checkpoint", ylabel="rise of the loss / rise in float32")
        left.set(title="bert-small-wiki, all weights trained", ylim=(0, None))
        styles = [
            Line2D([], [], color=GREY, linestyle=line, label=f"ρ = {rho}")
            for rho, line in ((0.003, "-"), (0.01, "--"))
        ]
        left.legend(handles=styles, frameon=False, loc="upper right")
        share = {(p["weights"], p["way"]): p["share"] for p in read["smollm2"] if p["rho"] == 0.003}
        for aside, way, (colour, marker) in zip((-0.12, 0.12), ("nearest", "deltasam"), looks.values(), strict=True):
            for place, source in enumerate(sources):
                value = share[source, way]
                up = value > 1 and way == "nearest"
                right.plot([place + aside] * 2, [1, value], color=colour, linewidth=1.5)
                right.plot(place + aside, value, color=colour, marker=marker, markersize=6)
                right.annotate(f"{value:.0f}" if value >= 10 else f"{value:.2f}", (place + aside, value), (0, 6 if up else -6),
                               textcoords="offset points", ha="center", va="bottom" if up else "top", color=colour,
                               fontsize="small")  # fmt: skip
                drawn.append(value)
        right.set(yscale="log", ylim=(0.1, 3 * max(share.values())), xlim=(-0.5, len(sources) - 0.5))
        right.yaxis.set_major_formatter("{x:g}")
        right.set_xticks(range(len(sources)), list(sources.values()))
        right.set(xlabel="origin of the weights", title="SmolLM2-135M, frozen weights, ρ = 0.003")
        for each in axes:
            each.axhline(1, color=GREY, linewidth=0.8, zorder=0)
        handles = [Line2D([], [], color=colour, marker=m, label=name) for name, (colour, m) in looks.items()]
        left.figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
        return rounded({"": drawn})

    return draw(2, (8.4, 3.5), fill)
