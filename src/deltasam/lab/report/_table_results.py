"""A table of any runs: methods by metrics, with seeds, means, intervals, and p against plain training."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from deltasam.lab.report._formats import latex_text, markdown_text
from deltasam.lab.report._learned import largest_class, learning_problems
from deltasam.lab.report._names import method_name, method_order, short_models
from deltasam.lab.report._runs import Run, Runs
from deltasam.lab.report._select import by_cell
from deltasam.lab.report._statistics import Comparison, paired_test, summarize
from deltasam.step.names import method_key, pluralized, suggest

if TYPE_CHECKING:
    from rich.table import Table as RichTable

PLAIN = "ERM"
_FEWEST = 3  # runs for an interval
# Metrics of the same model after rounding or scaling, on other data, and ends of intervals: only on request.
_SPECIAL = re.compile(r".*(_\d+bit.*|_on_.*|_scaled|_low|_high)|temperature|brier|general_nll.*")


@dataclass(frozen=True)
class Results:
    """A table of the runs of one task and model, as text."""

    title: str  #: Task, model, and the rows that were evaluated.
    header: tuple[str, ...]  #: Names of the columns.
    rows: tuple[tuple[str, ...], ...]  #: One per method, plain training first.
    notes: tuple[str, ...] = ()  #: Explanations.
    statistics: tuple[dict[str, Any], ...] = ()  #: Of every method and metric, for CSV.


def result_tables(runs: Runs, *, methods: Sequence[str] = (), metrics: Sequence[str] = ()) -> list[Results]:
    """Returns one table for each task and model.

    Args:
        runs: The runs.
        methods: Methods to show, as people write them; all by default.
        metrics: Metrics to show; by default the task's own, without those of rounded weights and other data.

    Raises:
        ValueError: There is no run of a method, or no run with a metric.
    """
    chosen = _of_methods(runs.finished, methods)
    for metric in metrics:
        known = dict.fromkeys(name for run in chosen for name in run.metrics)
        if metric not in known:
            raise ValueError(f"metrics={metric}: no run has it; {suggest(metric, known)}")
    cells = by_cell(chosen)
    short = short_models(model for _, model, _ in cells)
    setups: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for task, model, method in sorted(cells, key=lambda key: (*key[:2], method_order(key[2]))):
        setups.setdefault((task, model), {})[method] = cells[task, model, method]
    return [_table(f"{task}, {short[model]}", found, metrics) for (task, model), found in setups.items()]


def _of_methods(runs: Sequence[Run], methods: Sequence[str]) -> list[Run]:
    """The runs of these methods. ``sam`` is SAM alone, without regularisers or rules for the radius."""
    names = {run.method: {method_key(run.method), method_key(method_name(run.method))} for run in runs}
    for method in methods:
        if not any(method_key(method) in keys for keys in names.values()):
            raise ValueError(f"methods={method}: there is no run of it; {suggest(method, names)}")
    wanted = {method_key(method) for method in methods}
    return [run for run in runs if not wanted or names[run.method] & wanted]


def _table(title: str, found: dict[str, list[Run]], metrics: Sequence[str]) -> Results:
    first = next(iter(found.values()))[0]
    known = {name for runs in found.values() for run in runs for name in run.metrics}
    shown = [name for name in metrics or _usual_metrics(first) if name in known]
    rows, tests = [], list[Comparison]()
    for method, runs in found.items():
        difference = p = ""
        test = _against_plain(found, method, first.primary)
        if test is not None:
            tests.append(test)
            fewer = f" ({pluralized(test.pairs, 'pair')})" if test.pairs < len(runs) else ""
            difference = f"{test.difference:+.4f}{fewer}"
            p = f"{test.p:.3g}" if test.pairs > 1 else ""
        values = [_mean(_values(runs, name)) for name in shown]
        seconds = f"{fmean(run.train_seconds for run in runs):.0f}"
        rows.append((method_name(method), _settings(runs[0]), str(len(runs)), *values, difference, p, seconds))
    header = ("method", "settings", "seeds", *shown, f"{first.primary} − plain", "p", "seconds")
    statistics = [_statistics(title, found, method, name) for method in found for name in shown]
    return Results(_title(title, first), header, tuple(rows), tuple(_notes(found, tests)), tuple(statistics))


def _values(runs: Sequence[Run], metric: str) -> list[float]:
    return [run.metrics[metric] for run in runs if metric in run.metrics]


def _against_plain(found: dict[str, list[Run]], method: str, metric: str) -> Comparison | None:
    """The method against plain training, over the seeds that have both; None if there are none."""
    plain = {run.seed: run.metrics[metric] for run in found.get(PLAIN, []) if metric in run.metrics}
    common = [run for run in found[method] if run.seed in plain and metric in run.metrics and method != PLAIN]
    if not common:
        return None
    return paired_test([run.metrics[metric] for run in common], [plain[run.seed] for run in common])


def _statistics(setup: str, found: dict[str, list[Run]], method: str, metric: str) -> dict[str, Any]:
    values, test = _values(found[method], metric), _against_plain(found, method, metric)
    summary = summarize(values) if values else None
    names = {"mean": "mean", "median": "median", "max": "max", "std": "std", "ci_low": "low", "ci_high": "high"}
    return {
        "setup": setup,
        "method": method_name(method),
        "settings": _settings(found[method][0]),
        "metric": metric,
        "n": len(values),
        **{name: getattr(summary, attribute, None) for name, attribute in names.items()},
        "values": " ".join(map(repr, values)),
        "difference": None if test is None else test.difference,
        "pairs": 0 if test is None else test.pairs,
        "p": None if test is None or test.pairs < 2 else test.p,
        "seconds": fmean(run.train_seconds for run in found[method]),
    }


def _title(setup: str, run: Run) -> str:
    rows = "" if run.evaluation.rows is None else f", {pluralized(run.evaluation.rows, 'row')}"
    share = largest_class(run)
    largest = "" if share is None else f"; always answering the largest class: accuracy {share:.4f}"
    return f"{setup}: means over seeds on {run.evaluation.split}{rows}{largest}"


def _notes(found: dict[str, list[Run]], tests: Sequence[Comparison]) -> list[str]:
    runs = [run for each in found.values() for run in each]
    notes = []
    if any(len(each) >= _FEWEST for each in found.values()):
        notes.append("In brackets: 95% bootstrap intervals of the mean over seeds; with few seeds they are too short.")
    most = max(tests, key=lambda test: test.pairs, default=None)
    if most is not None and most.pairs > 1:
        exact = "exact " if all(test.exact for test in tests) else ""
        notes.append(
            f"p: {exact}paired permutation test against plain training (ERM) with the same seeds, not adjusted for "
            f"the number of methods; with {pluralized(most.pairs, 'pair')} no p below {most.smallest_p:.3g} is "
            "possible."
        )
    radii = {dict(run.settings)["rho"] for run in runs if "rho" in dict(run.settings)}
    if len(radii) > 1:
        notes.append(
            "The radii rho differ: each method has its own. At the same radius a perturbation per instance is much "
            "stronger than one per batch. method.rho=... sets one radius for all methods."
        )
    others = {name for name in ("lr",) if len({dict(run.settings)[name] for run in runs}) > 1}
    others |= {"updates"} if len({run.steps for run in runs}) > 1 else set()
    if others:
        notes.append(f"Not only the method differs, but also: {', '.join(sorted(others))}. Compare with care.")
    return [*notes, *learning_problems(runs)]


def _usual_metrics(run: Run) -> list[str]:
    names = [name for name in run.metrics if not _SPECIAL.fullmatch(name)]
    return [name for name in names if name != "loss" or "nll" not in names]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    found = summarize(values)
    interval = f" [{found.low:.4f}, {found.high:.4f}]" if found.n >= _FEWEST else ""
    return f"{found.mean:.4f}{interval}"


def _settings(run: Run) -> str:
    known = dict(run.settings)
    return ", ".join(f"{name} {known[name]:g}" for name in ("lr", "rho") if name in known)


def results_to_markdown(tables: Sequence[Results]) -> str:
    """Returns the tables in Markdown."""
    parts = []
    for table in tables:
        lines = [table.header, ("---",) * 2 + ("---:",) * (len(table.header) - 2), *table.rows]
        rows = [[cell if number == 1 else markdown_text(cell) for cell in line] for number, line in enumerate(lines)]
        text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        notes = "".join(f"\n- {markdown_text(note)}" for note in table.notes)
        parts.append(f"{markdown_text(table.title)}\n\n{text}\n{notes}\n")
    return "\n".join(parts)


def results_to_latex(tables: Sequence[Results]) -> str:
    """Returns the tables in LaTeX for a document that uses the package booktabs."""
    parts = []
    for table in tables:
        rows = [" & ".join(map(latex_text, row)) + r" \\" for row in (table.header, *table.rows)]
        rows.insert(1, r"\midrule")
        body = "\n".join([r"\toprule", *rows, r"\bottomrule"])
        columns = "ll" + "r" * (len(table.header) - 2)
        caption = latex_text(" ".join([f"{table.title}.", *table.notes]))
        head = "\\begin{table*}[t]\n\\centering\\small\n" + rf"\begin{{tabular}}{{{columns}}}"
        parts.append(f"{head}\n{body}\n\\end{{tabular}}\n\\caption{{{caption}}}\n\\end{{table*}}\n")
    return "\n".join(parts)


def results_to_csv(tables: Sequence[Results]) -> str:
    """Returns one line for each setup, method and metric, with all statistics."""
    rows = [row for table in tables for row in table.statistics]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value != value else value for name, value in row.items()} for row in rows)  # no nan
    return out.getvalue()


def results_to_terminal(table: Results) -> RichTable:
    """Returns the table for the terminal, without its notes."""
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=Text(table.title, style="bold"), title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(table.header):
        shown.add_column(Text(name), justify="left" if number < 2 else "right", no_wrap=number == 0)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown
