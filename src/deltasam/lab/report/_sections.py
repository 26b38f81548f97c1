"""The sections of the page after the results and the cost. :data:`SECTIONS` has all of them in order."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from deltasam.lab.report._calibration import calibration
from deltasam.lab.report._cost import cost
from deltasam.lab.report._figures import axes, draw_line, draw_map, draw_points, figure_of, finite, shorten
from deltasam.lab.report._forgetting import forgetting
from deltasam.lab.report._measured import LANDSCAPE, WEIGHTS
from deltasam.lab.report._names import method_name, short_models
from deltasam.lab.report._other_sets import other_sets
from deltasam.lab.report._results import interval_of, paired_tests, results, warnings
from deltasam.lab.report._rounding import rounding
from deltasam.lab.report._runs import Run
from deltasam.lab.report._section import Maker, PageRuns, Section, setup_title
from deltasam.lab.report._statistics import summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_MOST_ROWS = 2000


def statistics(runs: PageRuns) -> Section | None:
    """One row per task, model and method, with all statistics."""
    rows = []
    for (task, model), methods in runs.setups.items():
        for method, found in methods.items():
            values = summarize([run.score for run in found])
            interval = interval_of([run.score for run in found])
            risks = [runs.risks.values[run.run_id] for run in found if run.run_id in runs.risks.values]
            rows.append(
                {
                    "method": method_name(method),
                    "mean": f"{values.mean:.4f}",
                    "std": f"{values.std:.4f}" if values.n > 1 else "–",
                    "seeds": str(values.n),
                    "median": f"{values.median:.4f}",
                    "min": f"{values.min:.4f}",
                    "max": f"{values.max:.4f}",
                    "95% interval": f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else "–",
                    "metric": found[0].primary,
                    "task": task,
                    "model": model,
                    "adversarial risk": f"{fmean(risks):.3f}" if risks else "not measured",
                }
            )
    return Section(name="statistics", title="All statistics", rows=rows) if rows else None


def learning_curves(runs: PageRuns) -> Section | None:
    """The primary metric and the training loss."""
    figures = _curves(runs, runs.setups, {"": "", "loss": "training loss"}, title="Learning curves")
    return Section(name="curves", title="Learning curves", figures=figures) if figures else None


def sharpness(runs: PageRuns) -> Section | None:
    """The rise of the loss under the perturbation, one figure for each radius: it grows with the radius."""
    keys, figures = {"sharpness": "rise of the loss when perturbed"}, []
    for (task, model), methods in runs.setups.items():
        radii: dict[str, dict[str, list[Run]]] = {}
        for method, found in methods.items():
            radii.setdefault(found[0].radius, {})[method] = found
        for radius, same in radii.items():
            at = f", radius {radius}" if radius else ""
            figures += _curves(runs, {(task, model): same}, keys, title=f"Sharpness{at}")
    return Section(name="sharpness", title="Sharpness during training", figures=figures) if figures else None


def _curves(
    runs: PageRuns, setups: dict[tuple[str, str], dict[str, list[Run]]], keys: dict[str, str], *, title: str
) -> list[tuple[str, Figure]]:
    """One figure per task and model: a panel for each logged number, the mean over the seeds in a band of all.

    ``keys`` maps names in the log to labels; the empty name is the primary metric of the evaluations. A panel of
    single points is left out.
    """
    from matplotlib.ticker import MaxNLocator

    figures = []
    for (task, model), methods in setups.items():
        primary = next(iter(methods.values()))[0].primary
        panels: dict[str, dict[str, DataFrame]] = {}
        for key, label in keys.items():
            for method, found in methods.items():
                line = _line([runs.logs[run.run_id] for run in found], key or f"eval_{found[0].primary}")
                if len(line) > 1:
                    panels.setdefault(label or primary, {})[method] = line
        if panels:
            drawn = axes(len(panels))
            for ax, (label, lines) in zip(drawn, panels.items(), strict=True):
                for method, line in lines.items():
                    draw_line(ax, method, list(line.index), list(line["mean"]), (line["min"], line["max"]))
                ax.set_ylabel(shorten(label, 34))
                ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
            drawn[-1].set_xlabel("update")
            figures.append((f"{title}: {setup_title(task, model)}", drawn[0].figure))
    return figures


def _line(logs: Sequence[list[dict[str, Any]]], key: str) -> DataFrame:
    """Mean, smallest and largest value over the seeds, by update."""
    import pandas as pd

    points = [(float(entry["step"]), float(entry[key])) for log in logs for entry in log if key in entry]
    kept = [(step, value) for step, value in points if finite(value)]
    return pd.DataFrame(kept, columns=["step", "value"]).groupby("step")["value"].agg(["mean", "min", "max"])


def risk(runs: PageRuns) -> Section | None:
    """The primary metric against the adversarial risk, one point per run."""
    figures = []
    for (task, model), methods in runs.setups.items():
        measured = {
            method: [(runs.risks.values[run.run_id], run.score) for run in found if run.run_id in runs.risks.values]
            for method, found in methods.items()
        }
        if sum(map(len, measured.values())) > 1:
            primary = next(iter(methods.values()))[0].primary
            (ax,) = axes()
            for method, points in measured.items():
                name = method_name(method)
                draw_points(ax, method, [(x, y, f"{name}: {primary} {y:.4f}, risk {x:.4g}") for x, y in points])
            ax.set_xlabel("adversarial risk")
            ax.set_ylabel(shorten(primary, 34))
            figures.append((f"{primary} against adversarial risk: {setup_title(task, model)}", ax.figure))
    title = "Accuracy against adversarial risk"
    return Section(name="risk", title=title, figures=figures, lines=runs.risks.notes) if figures else None


def weights(runs: PageRuns) -> Section | None:
    """Instance weights: curves from the logs; distributions and examples where ``deltasam analyze`` measured them."""
    logged = {
        "weights_mean": "mean of g in a batch",
        "weights_std": "standard deviation of g",
        "weights_max": "largest g in a batch",
    }
    figures, rows, lines = _curves(runs, runs.setups, logged, title="Weights g in training"), [], []
    for (task, model), methods in runs.setups.items():
        for method, run in _each_run(methods):
            measured = run.measured(WEIGHTS) or {"weights": [], "examples": []}
            for example in measured["examples"]:
                row = {"text": str(example["text"]), "g": f"{example['weight']:.4g}", "rank": int(example["rank"])}
                rows.append({**row, "task": run.task, "method": method_name(method), "seed": run.seed})
            if wrong := measured.get("wrong_labels"):
                lines.append(
                    f"{task}, {model}, {method_name(method)}, seed {run.seed}: {wrong['count']} rows with a wrong "
                    f"label have a mean weight of {wrong['weight']:.3f}, the others {wrong['others']:.3f} (1 is the "
                    "mean of a batch)."
                )
            if len(measured["weights"]) > 1:
                (ax,) = axes()
                count = len(measured["weights"])
                draw_line(ax, method, [(k + 0.5) / count for k in range(count)], measured["weights"])
                ax.set_xlabel("share of the instances with at most this weight")
                ax.set_ylabel("g")
                title = f"Weights g at the end: {task}, {model}, {method_name(method)}, seed {run.seed}"
                figures.append((title, ax.figure))
    if not figures and not rows:
        return None
    return Section(name="weights", title="Instance weights", figures=figures, rows=rows, lines=lines)


def landscape(runs: PageRuns) -> Section | None:
    """Slices of the loss around the final weights where ``deltasam analyze landscape`` measured them.

    The lines of all runs are in one figure per direction. Each plane is a map; the maps of a task and model have the
    same colours. Losses that are not finite are omitted.
    """
    figures: list[tuple[str, Figure]] = []
    for (task, model), methods in runs.setups.items():
        lines: dict[str, Axes] = {}
        maps: dict[str, dict[str, Any]] = {}
        for method, run in _each_run(methods):
            measured = run.measured(LANDSCAPE) or {"lines": {}}
            for direction, line in measured["lines"].items():
                kept = [(x, y) for x, y in zip(line["x"], line["loss"], strict=True) if finite(y)]
                if len(kept) > 1:
                    ax = lines[direction] = lines.get(direction) or axes()[0]
                    draw_line(ax, method, [x for x, _ in kept], [y for _, y in kept])
            for direction, plane in measured.get("planes", {}).items():
                if len(_losses(plane)) > 1:
                    name = f"{setup_title(task, model)}, {method_name(method)}, seed {run.seed}"
                    maps[f"Loss along {direction}: {name}"] = plane
        every = [loss for plane in maps.values() for loss in _losses(plane)]
        for title, plane in maps.items():
            (ax,) = axes(height=2.8)
            draw_map(ax, plane, (min(every), max(every)))
            figures.append((title, figure_of(ax)))
        for direction, ax in lines.items():
            ax.set_xlabel("distance from the weights")
            ax.set_ylabel("loss")
            figures.append((f"Loss along {direction}: {task}, {model}", ax.figure))
    return Section(name="landscape", title="Loss landscape", figures=figures) if figures else None


def _losses(plane: dict[str, Any]) -> list[float]:
    """The losses of a plane that can be drawn."""
    return [loss for row in plane["loss"] for loss in row if finite(loss)]


def _each_run(methods: dict[str, list[Run]]) -> list[tuple[str, Run]]:
    return [(method, run) for method, found in methods.items() for run in found]


def all_runs(runs: PageRuns) -> Section | None:
    """One row per run, for at most 2,000 runs."""
    finished = runs.runs.finished
    short = short_models(run.model for run in finished)
    rows = [
        {
            "method": method_name(run.method),
            "value": f"{run.score:.4f}",
            "seed": str(run.seed),
            "task": run.task,
            "model": short[run.model],
            "metric": run.primary,
            "best": f"{run.best:.4f}",
            "updates": str(run.steps),
            "seconds": f"{run.train_seconds:.1f}",
            "settings": ", ".join(f"{name}={value:g}" for name, value in run.settings),
            "run": run.path.name,
        }
        for run in finished[:_MOST_ROWS]
    ]
    rest = len(finished) - _MOST_ROWS
    note = f"and {rest} more; `deltasam table` reads them all" if rest > 0 else ""
    return Section(name="runs", title="All runs", rows=rows, note=note) if rows else None


SECTIONS: tuple[Maker, ...] = (
    warnings, results, paired_tests, cost, calibration, rounding, other_sets, forgetting, learning_curves, risk,
    sharpness, weights, landscape, statistics,
)  # fmt: skip
"""Each makes a section, or None if the runs have nothing to show. The paper's tables and the list of runs follow."""
