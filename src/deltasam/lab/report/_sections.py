"""The sections of the page. A new section is a function here and an entry in :data:`SECTIONS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from deltasam.lab.report._compare import comparison_notes
from deltasam.lab.report._figures import axes, draw_line, draw_map, finite, look, shorten, svg
from deltasam.lab.report._measured import LANDSCAPE, WEIGHTS
from deltasam.lab.report._names import method_name, method_order, short_models
from deltasam.lab.report._risks import Risks, chosen_risks
from deltasam.lab.report._runs import Run, Runs, broken_measurements
from deltasam.lab.report._select import RULE, Cells, by_cell, select
from deltasam.lab.report._statistics import summarize
from deltasam.lab.report._table import Table
from deltasam.step.names import pluralized

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_MOST_ROWS = 2000


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page. The template decides which parts it shows; :func:`html_report` renders it."""

    name: str  #: Anchor.
    title: str  #: Heading.
    lines: Sequence[str] = ()  #: Sentences.
    figures: Sequence[tuple[str, Figure]] = ()  #: Titles and figures.
    rows: Sequence[dict[str, Any]] = ()  #: Rows of a table that can be sorted.
    note: str = ""  #: A note below the table.
    table: Table | None = None  #: A table of the paper.
    template: str = "section.html"  #: Template.

    def drawn(self) -> list[tuple[str, str]]:
        """Returns titles and SVG of the figures."""
        return [(title, svg(figure, title)) for title, figure in self.figures]

    @property
    def frame(self) -> DataFrame:
        """The rows as a frame."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def frame_html(self) -> str:
        """Returns the rows as HTML, with all text escaped."""
        import pandas as pd

        with pd.option_context("display.max_colwidth", None):
            return str(self.frame.to_html(index=False, border=0, classes="sortable"))


@dataclass(frozen=True)
class PageRuns:
    """The runs of a page."""

    runs: Runs

    @cached_property
    def cells(self) -> Cells:
        """The runs of each (task, model, method), with short names of the models."""
        found = by_cell(self.runs.finished)
        short = short_models(model for _, model, _ in found)
        return {(task, short[model], method): runs for (task, model, method), runs in found.items()}

    @cached_property
    def setups(self) -> dict[tuple[str, str], dict[str, list[Run]]]:
        """(task, model) to the runs of each method, sorted."""
        found: dict[tuple[str, str], dict[str, list[Run]]] = {}
        for task, model, method in sorted(self.cells, key=lambda key: (*key[:2], method_order(key[2]))):
            found.setdefault((task, model), {})[method] = self.cells[task, model, method]
        return found

    @cached_property
    def risks(self) -> Risks:
        """The adversarial risks that are comparable."""
        return chosen_risks(self.cells)

    @cached_property
    def logs(self) -> dict[str, list[dict[str, Any]]]:
        """The log of each run, by run id."""
        return {run.run_id: run.log() for found in self.cells.values() for run in found}


def summary(runs: PageRuns) -> Section:
    """The number of runs, comparisons of the methods, and what is missing."""
    finished, problems = runs.runs.finished, [*runs.runs.problems(), *broken_measurements(runs.runs.finished)]
    if not runs.cells:
        return Section(name="summary", title="Summary", lines=["There is no finished run here yet.", *problems])
    tasks = {run.task for found in runs.cells.values() for run in found}
    models = {model for _, model, _ in runs.cells}
    methods = sorted({method for _, _, method in runs.cells}, key=method_order)
    names = ", ".join(map(method_name, methods))
    count = f"{pluralized(len(finished), 'finished run')} of {pluralized(len(methods), 'method')} ({names}) "
    count += f"on {pluralized(len(tasks), 'task')} with {pluralized(len(models), 'model')}."
    compared = _comparisons(select(finished, strict=False).cells)
    return Section(name="summary", title="Summary", lines=[count, *compared, *problems])


def _comparisons(cells: Cells) -> list[str]:
    """Pools scores in points. Compares errors, whose unit depends on the task, for each task separately."""
    points: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    errors: dict[tuple[str, str], dict[tuple[str, str], dict[str, dict[int, float]]]] = {}
    for (task, model, method), runs in cells.items():
        higher, metric = runs[0].higher_is_better, runs[0].primary
        scores = points if higher else errors.setdefault((task, metric), {})
        scores.setdefault((model, method), {})[task] = {run.seed: (100 if higher else -1) * run.score for run in runs}
    notes = comparison_notes(points)
    for (_, metric), scores in sorted(errors.items()):
        notes += comparison_notes(scores, less_of=metric)
    return notes


def results(runs: PageRuns) -> Section | None:
    """One row per task, model and method, with all statistics."""
    rows = []
    for (task, model), methods in runs.setups.items():
        means = {method: fmean(run.score for run in found) for method, found in methods.items()}
        best = (max if next(iter(methods.values()))[0].higher_is_better else min)(means.values())
        for method, found in methods.items():
            values = summarize([run.score for run in found])
            risks = [runs.risks.values[run.run_id] for run in found if run.run_id in runs.risks.values]
            star = " ★" if len(set(means.values())) > 1 and means[method] == best else ""
            passes = [fmean(run.forwards for run in found), fmean(run.backwards for run in found)]
            rows.append(
                {
                    "task": task,
                    "model": model,
                    "method": method_name(method),
                    "metric": found[0].primary,
                    "runs": str(values.n),
                    "mean": f"{values.mean:.4f}{star}",
                    "std": f"{values.std:.4f}" if values.n > 1 else "–",
                    "95% CI of the mean": f"{values.low:.4f} to {values.high:.4f}",
                    "median": f"{values.median:.4f}",
                    "max": f"{values.max:.4f}",
                    "adversarial risk": f"{fmean(risks):.3f}" if risks else "not measured",
                    "ms per update": f"{fmean(1000 * run.step_seconds for run in found):.1f}",
                    "time / ERM": _relative_time(found, methods.get("ERM", [])),
                    "forward/backward": "/".join(f"{count:.0f}" for count in passes),
                    "peak MiB": f"{fmean(run.memory for run in found) / 2**20:.0f}",
                }
            )
    note = f"★ Best mean of the task and model. {RULE}"
    return Section(name="results", title="Results", rows=rows, note=note) if rows else None


def _relative_time(runs: Sequence[Run], erm: Sequence[Run]) -> str:
    """Time per update relative to ERM, if both ran on the same device."""
    if not erm or {run.device for run in runs} != {run.device for run in erm}:
        return "–"
    return f"{fmean(run.step_seconds for run in runs) / fmean(run.step_seconds for run in erm):.2f}"


def learning_curves(runs: PageRuns) -> Section | None:
    """The primary metric and the training loss."""
    figures = _curves(runs, {"": "", "loss": "training loss"}, title="Learning curves")
    return Section(name="curves", title="Learning curves", figures=figures) if figures else None


def sharpness(runs: PageRuns) -> Section | None:
    """The rise of the loss under the perturbation."""
    figures = _curves(runs, {"sharpness": "rise of the loss when perturbed"}, title="Sharpness")
    return Section(name="sharpness", title="Sharpness during training", figures=figures) if figures else None


def _curves(runs: PageRuns, keys: dict[str, str], *, title: str) -> list[tuple[str, Figure]]:
    """One figure per task and model: a panel for each logged number, the mean over the seeds in a band of all.

    ``keys`` maps names in the log to labels; the empty name is the primary metric of the evaluations.
    """
    from matplotlib.ticker import MaxNLocator

    figures = []
    for (task, model), methods in runs.setups.items():
        primary = next(iter(methods.values()))[0].primary
        panels: dict[str, dict[str, DataFrame]] = {}
        for key, label in keys.items():
            for method, found in methods.items():
                line = _line([runs.logs[run.run_id] for run in found], key or f"eval_{found[0].primary}")
                if len(line):
                    panels.setdefault(label or primary, {})[method] = line
        if panels:
            drawn = axes(len(panels))
            for ax, (label, lines) in zip(drawn, panels.items(), strict=True):
                for method, line in lines.items():
                    draw_line(ax, method, line.index, line["mean"], (line["min"], line["max"]))
                ax.set_ylabel(shorten(label, 34))
                ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
            drawn[-1].set_xlabel("update")
            figures.append((f"{title}: {task}, {model}", drawn[0].figure))
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
        if any(measured.values()):
            primary = next(iter(methods.values()))[0].primary
            (ax,) = axes()
            for method, points in measured.items():
                style = look(method)
                x, y = [x for x, _ in points], [y for _, y in points]
                ax.plot(x, y, color=style.color, linestyle="", marker=style.marker, markeredgecolor="white")
            ax.set_xlabel("adversarial risk")
            ax.set_ylabel(shorten(primary, 34))
            figures.append((f"{primary} against adversarial risk: {task}, {model}", ax.figure))
    title = "Accuracy against adversarial risk"
    return Section(name="risk", title=title, figures=figures, lines=runs.risks.notes) if figures else None


def weights(runs: PageRuns) -> Section | None:
    """Instance weights: curves from the logs; distributions and examples where ``deltasam analyze`` measured them."""
    logged = {
        "weights_mean": "mean of g in a batch",
        "weights_std": "standard deviation of g",
        "weights_max": "largest g in a batch",
    }
    figures, rows = _curves(runs, logged, title="Weights g in training"), []
    for (task, model), methods in runs.setups.items():
        for method, run in _each_run(methods):
            measured = run.measured(WEIGHTS) or {"weights": [], "examples": []}
            for example in measured["examples"]:
                row = {"text": str(example["text"]), "g": f"{example['weight']:.4g}", "rank": int(example["rank"])}
                rows.append({**row, "task": run.task, "method": method_name(method), "seed": run.seed})
            if measured["weights"]:
                (ax,) = axes()
                count = len(measured["weights"])
                draw_line(ax, method, [(k + 0.5) / count for k in range(count)], measured["weights"])
                ax.set_xlabel("share of the instances with at most this weight")
                ax.set_ylabel("g")
                title = f"Weights g at the end: {task}, {model}, {method_name(method)}, seed {run.seed}"
                figures.append((title, ax.figure))
    found = figures or rows
    return Section(name="weights", title="Instance weights", figures=figures, rows=rows) if found else None


def landscape(runs: PageRuns) -> Section | None:
    """Slices of the loss around the final weights where ``deltasam analyze landscape`` measured them.

    The lines of all runs are in one figure per direction. Each plane is a map. Losses that are not finite are omitted.
    """
    figures: list[tuple[str, Figure]] = []
    for (task, model), methods in runs.setups.items():
        lines: dict[str, Axes] = {}
        for method, run in _each_run(methods):
            measured = run.measured(LANDSCAPE) or {"lines": {}}
            for direction, line in measured["lines"].items():
                kept = [(x, y) for x, y in zip(line["x"], line["loss"], strict=True) if finite(y)]
                if kept:
                    ax = lines[direction] = lines.get(direction) or axes()[0]
                    draw_line(ax, method, [x for x, _ in kept], [y for _, y in kept])
            for direction, plane in measured.get("planes", {}).items():
                if any(finite(loss) for row in plane["loss"] for loss in row):
                    (ax,) = axes(height=2.8)
                    draw_map(ax, plane)
                    title = f"Loss along {direction}: {task}, {model}, {method_name(method)}, seed {run.seed}"
                    figures.append((title, ax.figure))
        for direction, ax in lines.items():
            ax.set_xlabel("distance from the weights")
            ax.set_ylabel("loss")
            figures.append((f"Loss along {direction}: {task}, {model}", ax.figure))
    return Section(name="landscape", title="Loss landscape", figures=figures) if figures else None


def _each_run(methods: dict[str, list[Run]]) -> list[tuple[str, Run]]:
    return [(method, run) for method, found in methods.items() for run in found]


def cost(runs: PageRuns) -> Section | None:
    """One figure per task and model, with a panel for each cost of an update and a bar for each method."""
    costs: dict[str, Callable[[Run], float]] = {
        "milliseconds per update": lambda run: 1000 * run.step_seconds,
        "passes per update (forward + backward)": lambda run: (run.forwards + run.backwards) / run.steps,
        "peak memory, MiB": lambda run: run.memory / 2**20,
    }
    figures = []
    for (task, model), methods in runs.setups.items():
        drawn, places = axes(len(costs), height=0.1 + 0.25 * len(methods), left=1.8), range(len(methods))
        for ax, (label, of_run) in zip(drawn, costs.items(), strict=True):
            values = [fmean(map(of_run, found)) for found in methods.values()]
            bars = ax.barh(places, values, color=[look(method).color for method in methods])
            ax.bar_label(bars, [f"{v:,.0f}" if v >= 1000 else f"{v:.3g}" for v in values], padding=3)
            ax.set_yticks(places, [shorten(method_name(method), 24) for method in methods])
            ax.invert_yaxis()
            ax.margins(x=0.15)
            ax.grid(visible=False)
            ax.set_xlabel(label)
        devices = sorted({run.device for _, run in _each_run(methods)})
        figures.append((f"Cost of an update: {task}, {model} ({', '.join(devices)})", drawn[0].figure))
    return Section(name="cost", title="Cost", figures=figures) if figures else None


def all_runs(runs: PageRuns) -> Section | None:
    """One row per run, for at most 2,000 runs."""
    finished = runs.runs.finished
    short = short_models(run.model for run in finished)
    rows = [
        {
            "run": run.path.name,
            "task": run.task,
            "model": short[run.model],
            "method": method_name(run.method),
            "seed": str(run.seed),
            "metric": run.primary,
            "value": f"{run.score:.4f}",
            "best": f"{run.best:.4f}",
            "updates": str(run.steps),
            "seconds": f"{run.train_seconds:.1f}",
            "settings": ", ".join(f"{name}={value:g}" for name, value in run.settings),
        }
        for run in finished[:_MOST_ROWS]
    ]
    rest = len(finished) - _MOST_ROWS
    note = f"and {rest} more; `deltasam table` reads them all" if rest > 0 else ""
    return Section(name="runs", title="All runs", rows=rows, note=note) if rows else None


SECTIONS: tuple[Callable[[PageRuns], Section | None], ...] = (
    summary, results, learning_curves, risk, sharpness, weights, landscape, cost,
)  # fmt: skip
"""Each makes a section, or None if the runs have nothing to show. The paper's tables and the list of runs follow."""
