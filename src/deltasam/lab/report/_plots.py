"""The plots of the report: what is drawn of which runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from deltasam.lab.report._colors import look
from deltasam.lab.report._measured import LANDSCAPE, WEIGHTS, landscape_in, weights_in
from deltasam.lab.report._names import method_name, method_order
from deltasam.lab.report._runs import Run
from deltasam.lab.report._select import Key
from deltasam.lab.report._svg import Series, bar_chart, line_chart, map_chart, scatter_chart

Cells = dict[Key, list[Run]]
Logs = dict[str, list[dict[str, float]]]
"""The log of each run, by its id."""
Plot = tuple[str, str]
"""Title and SVG."""


def curves(cells: Cells, logs: Logs, name: str | None, *, what: str, unit: str) -> Iterator[Plot]:
    """One plot per task and model of a logged number over the updates: mean of the seeds, band from least to most.

    Args:
        cells: The runs.
        logs: Their logs.
        name: The number in the log; None for the primary metric of the evaluations.
        what: What it is, for the title.
        unit: What it is, for the axis.

    Yields:
        Title and SVG of every plot that has something to show.
    """
    for task, model in _setups(cells):
        series = []
        for method, runs in _methods(cells, task, model):
            key = name or f"eval_{runs[0].primary}"
            points: dict[float, list[float]] = {}
            for run in runs:
                for entry in logs[run.run_id]:
                    if math.isfinite(entry.get(key, math.nan)):
                        points.setdefault(entry["step"], []).append(float(entry[key]))
            if points:
                steps = sorted(points)
                found = [points[step] for step in steps]
                lows, highs = [min(p) for p in found], [max(p) for p in found]
                series.append(Series(method_name(method), look(method), steps, list(map(fmean, found)), lows, highs))
        if series:
            title = f"{what}: {task}, {model}"
            yield title, line_chart(series, title=title, x="update", y=unit if name else _primary(cells, task, model))


def risk_scatter(cells: Cells, risk_of: Mapping[str, float]) -> Iterator[Plot]:
    """Primary metric over adversarial risk (by the run's id), one point per run."""
    for task, model in _setups(cells):
        series = []
        for method, runs in _methods(cells, task, model):
            measured = [run for run in runs if run.run_id in risk_of]
            points = [(risk_of[run.run_id], run.metrics[run.primary]) for run in measured]
            if points:
                series.append(
                    Series(method_name(method), look(method), [a for a, _ in points], [b for _, b in points])
                )
        if series:
            title = f"{_primary(cells, task, model)} against adversarial risk: {task}, {model}"
            yield title, scatter_chart(series, title=title, x="adversarial risk", y=_primary(cells, task, model))


def cost_bars(cells: Cells) -> Iterator[Plot]:
    """Time and passes of an update, and peak memory, per method."""
    for task, model in _setups(cells):
        methods = _methods(cells, task, model)
        devices = {run.device for _, runs in methods for run in runs}
        bars = {
            "milliseconds per update": lambda run: 1000 * run.train_seconds / run.steps,
            "passes per update (forward + backward)": lambda run: (run.forwards + run.backwards) / run.steps,
            "peak memory, MiB": lambda run: run.memory / 2**20,
        }
        for unit, value in bars.items():
            rows = [(method_name(m), look(m), fmean(value(run) for run in runs)) for m, runs in methods]
            title = f"{unit[0].upper()}{unit[1:]}: {task}, {model} ({', '.join(sorted(devices))})"
            yield title, bar_chart(rows, title=title, x=unit)


def weight_histograms(cells: Cells) -> Iterator[Plot]:
    """How the weights g of the instances are distributed, where ``deltasam analyze examples`` measured them."""
    for (task, model, method), runs in sorted(cells.items()):
        for run in runs:
            weights = (weights_in(run.analysis(WEIGHTS)) or {}).get("weights")
            if weights:
                share = [(k + 0.5) / len(weights) for k in range(len(weights))]
                title = f"Weights g at the end: {task}, {model}, {method_name(method)}, seed {run.seed}"
                one = Series(method_name(method), look(method), share, weights)
                yield title, line_chart([one], title=title, x="share of the instances with at most this weight", y="g")


def landscapes(cells: Cells) -> Iterator[Plot]:
    """Slices of the loss that ``deltasam analyze landscape`` left in the run folders, as far as they are finite."""
    for task, model in _setups(cells):
        lines: dict[str, list[Series]] = {}
        for method, runs in _methods(cells, task, model):
            for run in runs:
                found = landscape_in(run.analysis(LANDSCAPE)) or {}
                for direction, slice_ in found.get("lines", {}).items():
                    points = [p for p in zip(slice_["x"], slice_["loss"], strict=True) if math.isfinite(p[1])]
                    if points:
                        label = f"{method_name(method)}, seed {run.seed}"
                        one = Series(label, look(method), [x for x, _ in points], [loss for _, loss in points])
                        lines.setdefault(direction, []).append(one)
                for direction, plane in found.get("planes", {}).items():
                    if not any(math.isfinite(loss) for row in plane["loss"] for loss in row):
                        continue
                    title = f"Loss along {direction}: {task}, {model}, {method_name(method)}, seed {run.seed}"
                    yield title, map_chart(plane["x"], plane["y"], plane["loss"], title=title, unit="loss")
        for direction, series in lines.items():
            title = f"Loss along {direction}: {task}, {model}"
            yield title, line_chart(series, title=title, x="distance from the weights", y="loss")


def _setups(cells: Cells) -> list[tuple[str, str]]:
    return sorted({(task, model) for task, model, _ in cells})


def _methods(cells: Cells, task: str, model: str) -> list[tuple[str, Sequence[Run]]]:
    found = [(method, runs) for (t, m, method), runs in cells.items() if (t, m) == (task, model)]
    return sorted(found, key=lambda pair: method_order(pair[0]))


def _primary(cells: Cells, task: str, model: str) -> str:
    return next(runs[0].primary for (t, m, _), runs in cells.items() if (t, m) == (task, model))
