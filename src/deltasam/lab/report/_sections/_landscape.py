"""Slices of the loss around the final weights, where ``deltasam analyze landscape`` measured them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltasam.lab.report._figures import axes, draw_line, draw_map, finite
from deltasam.lab.report._measured import LANDSCAPE
from deltasam.lab.report._names import method_name
from deltasam.lab.report._sections._base import PageRuns, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def landscape(runs: PageRuns) -> Section | None:
    """Lines of all runs in one figure per direction, and a map for each plane, as far as the losses are finite."""
    figures: list[tuple[str, Figure]] = []
    for (task, model), methods in runs.setups.items():
        lines: dict[str, Axes] = {}
        for method, run in ((method, run) for method, found in methods.items() for run in found):
            measured = run.measured(LANDSCAPE) or {"lines": {}}
            for direction, line in measured["lines"].items():
                kept = [n for n, good in enumerate(finite(line["loss"])) if good]
                if kept:
                    ax = lines[direction] = lines.get(direction) or axes()[0]
                    draw_line(ax, method, [line["x"][n] for n in kept], [line["loss"][n] for n in kept])
            for direction, plane in measured.get("planes", {}).items():
                if any(any(finite(row)) for row in plane["loss"]):
                    (ax,) = axes(height=2.8)
                    draw_map(ax, plane)
                    title = f"Loss along {direction}: {task}, {model}, {method_name(method)}, seed {run.seed}"
                    figures.append((title, ax.figure))
        for direction, ax in lines.items():
            ax.set_xlabel("distance from the weights")
            ax.set_ylabel("loss")
            figures.append((f"Loss along {direction}: {task}, {model}", ax.figure))
    return Section(name="landscape", title="Loss landscape", figures=figures) if figures else None
