"""Logged numbers over the updates: mean over the seeds, with a band from the smallest to the largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deltasam.lab.report._figures import axes, draw_line, finite, shorten
from deltasam.lab.report._sections._base import PageRuns, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def learning_curves(runs: PageRuns) -> Section | None:
    """The primary metric and the training loss."""
    figures = curves(runs, {"": "", "loss": "training loss"}, title="Learning curves")
    return Section(name="curves", title="Learning curves", figures=figures) if figures else None


def sharpness(runs: PageRuns) -> Section | None:
    """The rise of the loss under the perturbation."""
    figures = curves(runs, {"sharpness": "rise of the loss when perturbed"}, title="Sharpness")
    return Section(name="sharpness", title="Sharpness during training", figures=figures) if figures else None


def curves(runs: PageRuns, keys: dict[str, str], *, title: str) -> list[tuple[str, Figure]]:
    """Makes one figure per task and model, with a panel for each number that was logged.

    Args:
        runs: The runs.
        keys: Names in the log with their labels; the empty name is the primary metric of the evaluations.
        title: What the figures show.
    """
    from matplotlib.ticker import MaxNLocator

    figures = []
    for (task, model), methods in runs.setups.items():
        primary = next(iter(methods.values()))[0].primary
        panels: list[tuple[str, dict[str, Any]]] = []
        for key, label in keys.items():
            lines = {
                method: line
                for method, found in methods.items()
                if len(line := _line([runs.logs[run.run_id] for run in found], key or f"eval_{found[0].primary}"))
            }
            if lines:
                panels.append((label or primary, lines))
        if panels:
            drawn = axes(len(panels))
            for ax, (label, lines) in zip(drawn, panels, strict=True):
                for method, line in lines.items():
                    draw_line(ax, method, line.index, line["mean"], (line["min"], line["max"]))
                ax.set_ylabel(shorten(label, 34))
                ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
            drawn[-1].set_xlabel("update")
            figures.append((f"{title}: {task}, {model}", drawn[0].figure))
    return figures


def _line(logs: Sequence[list[dict[str, Any]]], key: str) -> Any:
    """Mean, smallest and largest value over the seeds, by update."""
    import pandas as pd

    points = [(float(entry["step"]), float(entry[key])) for log in logs for entry in log if key in entry]
    kept = [point for point, good in zip(points, finite([value for _, value in points]), strict=True) if good]
    return pd.DataFrame(kept, columns=["step", "value"]).groupby("step")["value"].agg(["mean", "min", "max"])
