"""The paper's tables: GLUE, STS, summarization, adversarial risk, hyperparameters, running time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import deltasam.lab.report.paper as paper
from deltasam.lab.report._compare import comparison_notes
from deltasam.lab.report._evaluation import STANDARD
from deltasam.lab.report._measured import RISK
from deltasam.lab.report._names import method_name, method_order, paper_model, short_models
from deltasam.lab.report._risks import chosen_risks
from deltasam.lab.report._runs import Runs, broken_measurements
from deltasam.lab.report._select import RULE, Cells, select
from deltasam.lab.report._table import Cell, Column, Row, Table

_HEADERS = {
    "glue": {
        "mnli": "MNLI-m", "qqp": "QQP", "rte": "RTE", "qnli": "QNLI", "mrpc": "MRPC", "cola": "CoLA (Mcc)",
        "sst2": "SST-2", "stsb": "STS-B (r)",
    },
    "sts": paper.STS_SETS,
    "summarization": paper.ROUGE,
}  # fmt: skip
TABLE_TASKS: dict[str, tuple[str, ...]] = {
    "glue": paper.GLUE_TASKS,
    "hyperparameters": paper.GLUE_TASKS,
    "sts": ("mirror",),
    "summarization": ("cnn_dailymail",),
}
"""The tasks of each table that does not cover all tasks."""


def glue_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 1: eight tasks of GLUE."""
    where = {task: (task, STANDARD[task].metric) for task in paper.GLUE_TASKS}
    return _score_table("glue", "GLUE, development set", runs, where, paper.GLUE, aggregate)


def sts_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 2: seven sets of semantic textual similarity."""
    where = {name: ("mirror", name) for name in paper.STS_SETS}
    return _score_table("sts", "Self-supervised STS, Spearman", runs, where, paper.STS, aggregate)


def summarization_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 3: ROUGE on CNN/DailyMail. Other tasks with a ROUGE are not in it."""
    where = {name: ("cnn_dailymail", name) for name in paper.ROUGE}
    title = "CNN/DailyMail summarization"
    return _score_table("summarization", title, runs, where, paper.SUMMARIZATION, aggregate)


def _score_table(
    name: str, title: str, runs: Runs, where: dict[str, tuple[str, str]], source: paper.Source, aggregate: str
) -> Table:
    """A table of scores. ``where`` has the task and the metric of each column."""
    tasks = {task for task, _ in where.values()}
    of_one_run, average = len(tasks) == 1, name != "summarization"
    chosen = select(
        runs.finished, lambda run: run.task in tasks and (not of_one_run or where.keys() <= run.metrics.keys())
    )
    scores, rows = {}, []
    for group, model, figures, methods in _groups(name, chosen.cells, source):
        how = {column: chosen.unusual.get((task, model), "") for column, (task, _) in where.items()}
        for method in methods:
            found = {
                column: {run.seed: 100 * run.metrics[metric] for run in chosen.cells.get((task, model, method), [])}
                for column, (task, metric) in where.items()
            }
            scores[group, method] = found
            theirs = figures.get(method, {})
            cells = {key: Cell(tuple(values.values()), theirs.get(key), how[key]) for key, values in found.items()}
            if average:
                unusual = "; ".join(dict.fromkeys(filter(None, how.values())))
                # The paper averages the best run of each column. Columns of one run are averaged seed by seed instead.
                columns = () if of_one_run else tuple(cells.values())
                cells = {"avg": Cell(_averages(found), theirs.get("avg"), unusual, columns), **cells}
            rows.append(Row(group, method, method_name(method), cells))
    headers = ({"avg": "avg."} if average else {}) | _HEADERS[name]
    decimals = 2 if of_one_run else 1
    shown = tuple(Column(key=key, header=header, decimals=decimals) for key, header in headers.items())
    notes = (*comparison_notes(scores, of_one_run=of_one_run), RULE, *chosen.notes, *runs.problems())
    return Table(name, title, shown, tuple(rows), aggregate, source, notes)


def risk_table(runs: Runs, *, aggregate: str = "mean", rho: float | None = None) -> Table:
    """Table 4: adversarial risk, and median and best accuracy, of each method on each task with a measured risk.

    Args:
        runs: The runs.
        aggregate: How several runs become one number.
        rho: The radius of the risks; the most frequent one by default.
    """
    chosen = select(runs.finished)
    risk = chosen_risks(chosen.cells, rho)
    measured = {key[0] for key, found in chosen.cells.items() if any(run.run_id in risk.values for run in found)}
    tasks = list(dict.fromkeys(["mrpc", "rte", *sorted(measured)]))
    columns = [
        Column(key=f"{task} risk", header=f"{task} L_adv", paper_aggregate="mean", lower_is_better=True, decimals=2)
        for task in tasks
    ] + [
        Column(key=f"{task} {how}", header=f"{task} {how}", aggregate=how, paper_aggregate=how)
        for task in tasks
        for how in ("median", "max")
    ]
    shown = {key: found for key, found in chosen.cells.items() if key[0] in tasks}
    rows = []
    for group, model, figures, methods in _groups("adversarial-risk", shown, paper.ADVERSARIAL_RISK):
        for method in methods:
            cells, theirs = {}, figures.get(method, {})
            for task in tasks:
                found = shown.get((task, model, method), [])
                risks = tuple(risk.values[run.run_id] for run in found if run.run_id in risk.values)
                cells[f"{task} risk"] = Cell(risks, theirs.get(f"{task} risk"))
                scores, unusual = tuple(100 * run.score for run in found), chosen.unusual.get((task, model), "")
                for how in ("median", "max"):
                    cells[f"{task} {how}"] = Cell(scores, theirs.get(f"{task} {how}"), unusual)
            rows.append(Row(group, method, method_name(method), cells))
    advice = "`deltasam table adversarial-risk RUNS --measure` measures what is missing."
    broken = broken_measurements(runs.finished, [RISK])
    unusual_notes = select(runs.finished, lambda run: run.task in tasks).notes
    notes = (*risk.notes, *broken, advice, RULE, *unusual_notes, *runs.problems())
    title, source = "Adversarial risk and primary metric", paper.ADVERSARIAL_RISK
    return Table("adversarial-risk", title, tuple(columns), tuple(rows), aggregate, source, notes)


def hyperparameter_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 5: rho and eta of SAM and delta-SAM with the best results on the development set."""
    tasks = paper.GLUE_TASKS
    chosen = select(runs.finished, lambda run: run.task in tasks and run.method in ("SAM", "DeltaSAM"))
    rows = []
    for group, model, figures, _ in _groups("hyperparameters", chosen.cells, paper.HYPERPARAMETERS):
        for name, sign in {"SAM rho": "ρ", "DeltaSAM rho": "ρ", "DeltaSAM eta": "η"}.items():
            method, setting = name.split()
            cells = {}
            for task in tasks:
                best = {dict(run.settings)[setting] for run in chosen.cells.get((task, model, method), [])}
                unusual = chosen.unusual.get((task, model), "")
                cells[task] = Cell(tuple(best), figures.get(name, {}).get(task), unusual)
            rows.append(Row(group, name, f"{method_name(method)} {sign}", cells))
    columns = tuple(Column(key=task, header=task.upper(), decimals=None) for task in tasks)
    title, source = "Hyperparameters with the best mean on the development set", paper.HYPERPARAMETERS
    notes = (RULE, *chosen.notes, *runs.problems())
    return Table("hyperparameters", title, columns, tuple(rows), aggregate, source, notes)


def time_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 6: minutes of training, and time per update relative to SAM."""
    chosen = select(runs.finished)
    tasks = [*paper.GLUE_TASKS, *sorted({task for task, _, _ in chosen.cells} - set(paper.GLUE_TASKS))]
    rows = []
    for group, model, figures, methods in _groups("running-time", chosen.cells, paper.RUNNING_TIME):
        for method in methods:
            found = {task: chosen.cells.get((task, model, method), []) for task in tasks}
            minutes = {task: tuple(run.train_seconds / 60 for run in found[task]) for task in tasks}
            cells = {task: Cell(minutes[task], figures.get(method, {}).get(task)) for task in tasks}
            rows.append(Row(group, method, method_name(method), cells))
        for method in ("DeltaSAM", "PerInstanceSAM"):
            cells = {task: _ratio(method, task, model, chosen.cells, figures) for task in tasks}
            if any(cell.values or cell.paper is not None for cell in cells.values()):
                rows.append(Row(group, f"{method} / SAM", f"{method_name(method)} / SAM, per update", cells))
    devices = sorted({run.device for found in chosen.cells.values() for run in found})
    columns = tuple(Column(key=task, header=task.upper(), lower_is_better=True, decimals=2) for task in tasks)
    title = "Minutes of training; per update relative to SAM"
    notes = (f"Ours on: {'; '.join(devices) or 'nothing yet'}.", RULE, *chosen.left_out, *runs.problems())
    return Table("running-time", title, columns, tuple(rows), aggregate, paper.RUNNING_TIME, notes)


def _ratio(method: str, task: str, model: str, cells: Cells, figures: dict[str, dict[str, float]]) -> Cell:
    """The time per update divided by SAM's: the only number of this table that is comparable between machines."""
    slow, fast = (cells.get((task, model, name), []) for name in (method, "SAM"))
    pairs = [(a, b) for a in slow for b in fast if a.seed == b.seed and a.device == b.device]
    theirs, sams = (figures.get(name, {}).get(task) for name in (method, "SAM"))
    ratio = theirs / sams if theirs is not None and sams else None
    return Cell(tuple(a.step_seconds / b.step_seconds for a, b in pairs), ratio)


def _groups(
    table: str, cells: Cells, source: paper.Source
) -> Iterator[tuple[str, str, dict[str, dict[str, float]], list[str]]]:
    """Yields the groups: heading, our model (empty if there is none), the paper's figures, the methods of both.

    The paper's models come first. Two models that the paper has one name for, such as cased and uncased, stay apart.
    """
    ours = sorted({model for _, model, _ in cells})
    short = short_models(ours)
    groups = []
    for named in source.figures:
        same = [model for model in ours if paper_model(table, model) == named]
        groups += [(f"{named} ({short[model]})" if len(same) > 1 else named, model, named) for model in same or [""]]
    groups += [(short[model], model, "") for model in ours if paper_model(table, model) not in source.figures]
    for heading, model, named in groups:
        figures = source.figures.get(named, {})
        methods = {method for _, at, method in cells if at == model} | set(figures)
        yield heading, model, figures, sorted(methods, key=method_order)


def _averages(found: dict[str, dict[int, float]]) -> tuple[float, ...]:
    """The average over the columns for each seed; empty if the columns differ in their seeds."""
    seeds = {tuple(by_seed) for by_seed in found.values()}
    if len(seeds) != 1:
        return ()
    return tuple(sum(by_seed[seed] for by_seed in found.values()) / len(found) for seed in seeds.pop())


TABLES: dict[str, Callable[..., Table]] = {
    "glue": glue_table,
    "sts": sts_table,
    "summarization": summarization_table,
    "adversarial-risk": risk_table,
    "hyperparameters": hyperparameter_table,
    "running-time": time_table,
}
"""The paper's tables by name."""
