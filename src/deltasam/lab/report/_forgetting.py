"""The section on forgetting: general text and the task's metric against the radius."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from deltasam.lab.report._figures import add_tip, axes, draw_line, figure_of, look, shorten
from deltasam.lab.report._names import method_name, method_order
from deltasam.lab.report._results import interval_of
from deltasam.lab.report._runs import Run
from deltasam.lab.report._section import PageRuns, Section, setup_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORGETTING = "forgetting"


def forgetting(runs: PageRuns) -> Section | None:
    """Forgetting against the radius, one line per method, and a table with a row for each radius.

    Forgetting is the rise of the loss on general text. A line joins runs that differ in nothing but the radius.
    """
    figures, rows = [], []
    for task, model in runs.setups:
        variants = {
            method: [found for found in runs.variants[task, model, method] if _FORGETTING in found[0].metrics]
            for method in sorted(runs.setups[task, model], key=method_order)
        }
        rows += [_row(same, task, model) for found in variants.values() for same in found]
        lines = _lines(variants)
        if lines:
            primary = runs.setups[task, model][next(iter(lines))][0].primary
            for metric in (_FORGETTING, primary):
                title = f"{metric} against the radius: {setup_title(task, model)}"
                figures.append((title, _figure(lines, variants.get("ERM", []), metric)))
    intro = (
        "Forgetting is the rise of the loss per token on general text through the training; below 0 the model got "
        "better. Horizontal line: plain training. Band: 95% interval, for three seeds or more."
    )
    return Section(name="forgetting", title="Forgetting", intro=intro, figures=figures, rows=rows) if rows else None


def _row(same: Sequence[Run], task: str, model: str) -> dict[str, str]:
    return {
        "method": method_name(same[0].method),
        "forgetting": f"{fmean(_values(same, _FORGETTING)):+.4f}".replace("-", "−"),
        "mean": f"{fmean(run.score for run in same):.4f}",
        "metric": same[0].primary,
        "radius": same[0].radius or "–",
        "seeds": str(len(same)),
        "task": task,
        "model": model,
    }


def _lines(variants: dict[str, list[list[Run]]]) -> dict[str, dict[float, list[Run]]]:
    """The runs by radius of each method that has several. All else is equal; of several lines the longest counts."""
    lines = {}
    for method, found in variants.items():
        by_others: dict[object, dict[float, list[Run]]] = {}
        for same in found:
            radius = dict(same[0].settings).get("rho")
            if radius is not None:
                others = tuple(item for item in same[0].settings if item[0] != "rho"), same[0].conditions
                by_others.setdefault(others, {})[radius] = same
        longest = max(by_others.values(), key=len, default={})
        if len(longest) > 1:
            lines[method] = longest
    return lines


def _figure(lines: dict[str, dict[float, list[Run]]], plain: Sequence[Sequence[Run]], metric: str) -> Figure:
    (ax,) = axes()
    for same in plain:
        value = fmean(_values(same, metric))
        add_tip(ax.axhline(value, color=look("ERM").color, linewidth=1), f"{method_name('ERM')}: {value:.4g}")
    for method, radii in lines.items():
        x = sorted(radii)
        values = [_values(radii[radius], metric) for radius in x]
        ends = [interval_of(one) or (fmean(one), fmean(one)) for one in values]
        draw_line(ax, method, x, list(map(fmean, values)), ([low for low, _ in ends], [high for _, high in ends]))
    every = sorted({radius for radii in lines.values() for radius in radii})
    if every[0] > 0:
        ax.set_xscale("log")
    ax.set_xticks(every, [f"{radius:g}" for radius in every])
    ax.set_xticks([], minor=True)
    ax.set_ylabel(shorten(metric, 34))
    ax.set_xlabel("radius")
    return figure_of(ax)


def _values(runs: Sequence[Run], metric: str) -> list[float]:
    return [run.metrics[metric] for run in runs if metric in run.metrics]
