"""The paper's tables that are not about scores alone: adversarial risk, hyperparameters, running time."""

from __future__ import annotations

from collections.abc import Iterable

from deltasam.lab.report import paper
from deltasam.lab.report._measured import RISK, broken
from deltasam.lab.report._names import method_name, method_order
from deltasam.lab.report._risks import chosen_risks
from deltasam.lab.report._runs import Run, Runs
from deltasam.lab.report._scores import groups, primary_values
from deltasam.lab.report._select import RULE, Key, select
from deltasam.lab.report._table import Cell, Column, Row, Table


def risk_table(runs: Runs, *, aggregate: str = "mean", rho: float | None = None) -> Table:
    """Table 4: adversarial risk, and median and best accuracy, of each method on each task that was measured.

    Args:
        runs: The runs.
        aggregate: How several runs become one number.
        rho: The radius of the risks; by default the most frequent one.
    """
    chosen = select(runs.finished)
    cells, measured = chosen.cells, chosen_risks(chosen.cells, rho)
    risks = {
        key: tuple(measured.values[run.run_id] for run in found if run.run_id in measured.values)
        for key, found in cells.items()
    }
    tasks = list(dict.fromkeys(["mrpc", "rte", *sorted(task for (task, _, _), found in risks.items() if found)]))
    columns = [
        Column(key=f"{task} risk", header=f"{task} L_adv", paper_aggregate="mean", lower_is_better=True, decimals=2)
        for task in tasks
    ] + [
        Column(key=f"{task} {how}", header=f"{task} {how}", aggregate=how, paper_aggregate=how)
        for task in tasks
        for how in ("median", "max")
    ]
    kept = {key for key in cells if key[0] in tasks}
    rows = []
    source = paper.ADVERSARIAL_RISK
    for group, model, named in groups("adversarial-risk", [model for _, model, _ in kept], source):
        figures = source.figures.get(named, {})
        for method in _methods((key for key in kept if key[1] == model), figures):
            found: dict[str, Cell] = {}
            for task in tasks:
                key = (task, model, method)
                at = figures.get(method, {})
                found[f"{task} risk"] = Cell(risks.get(key, ()), at.get(f"{task} risk"))
                for how in ("median", "max"):
                    scores = tuple(primary_values(cells.get(key, [])))
                    unusual = chosen.unusual.get((task, model), "")
                    found[f"{task} {how}"] = Cell(scores, at.get(f"{task} {how}"), unusual)
            rows.append(Row(group, method, method_name(method), found))
    advice = "`deltasam table adversarial-risk RUNS --measure` measures what is missing."
    shown = select(runs.finished, lambda run: run.task in tasks)
    return Table(
        name="adversarial-risk",
        title="Adversarial risk and primary metric",
        columns=tuple(columns),
        rows=tuple(rows),
        aggregate=aggregate,
        paper_aggregate=source.aggregate,
        source=source.table,
        notes=(*measured.notes, *broken(runs.finished, RISK), advice, RULE, *shown.notes, *runs.problems()),
    )


def hyperparameter_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 5: rho and eta of SAM and delta-SAM that came out best on the development set."""
    chosen = select(runs.finished, lambda run: run.task in paper.GLUE_TASKS and run.method in ("SAM", "DeltaSAM"))
    cells = chosen.cells
    source = paper.HYPERPARAMETERS
    rows = []
    for group, model, named in groups("hyperparameters", [model for _, model, _ in cells], source):
        for name in ("SAM rho", "DeltaSAM rho", "DeltaSAM eta"):
            method, setting = name.split()
            figures = source.figures.get(named, {}).get(name, {})
            found = {}
            for task in paper.GLUE_TASKS:
                best = {dict(run.settings)[setting] for run in cells.get((task, model, method), [])}
                found[task] = Cell(tuple(best), figures.get(task), chosen.unusual.get((task, model), ""))
            sign = {"rho": "ρ", "eta": "η"}[setting]
            rows.append(Row(group, name, f"{method_name(method)} {sign}", found))
    return Table(
        name="hyperparameters",
        title="Hyperparameters with the best mean on the development set",
        columns=tuple(Column(key=task, header=task.upper(), decimals=None) for task in paper.GLUE_TASKS),
        rows=tuple(rows),
        aggregate=aggregate,
        paper_aggregate=source.aggregate,
        source=source.table,
        notes=(RULE, *chosen.notes, *runs.problems()),
    )


def time_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 6: minutes of training, and time per update relative to SAM."""
    chosen = select(runs.finished)
    cells = chosen.cells
    source = paper.RUNNING_TIME
    extra = sorted({task for task, _, _ in cells} - set(paper.GLUE_TASKS))
    tasks = [*paper.GLUE_TASKS, *extra]
    rows = []
    for group, model, named in groups("running-time", [model for _, model, _ in cells], source):
        figures = source.figures.get(named, {})
        of_model = [key for key in cells if key[1] == model]
        for method in _methods(of_model, figures):
            at = figures.get(method, {})
            minutes = {t: tuple(r.train_seconds / 60 for r in cells.get((t, model, method), [])) for t in tasks}
            rows.append(Row(group, method, method_name(method), {t: Cell(minutes[t], at.get(t)) for t in tasks}))
        rows += _ratios(cells, group, model, tasks, figures)
    devices = sorted({run.device for found in cells.values() for run in found})
    return Table(
        name="running-time",
        title="Minutes of training; per update relative to SAM",
        columns=tuple(Column(key=task, header=task.upper(), lower_is_better=True, decimals=2) for task in tasks),
        rows=tuple(rows),
        aggregate=aggregate,
        paper_aggregate=source.aggregate,
        source=source.table,
        notes=(f"Ours on: {'; '.join(devices) or 'nothing yet'}.", RULE, *chosen.left_out, *runs.problems()),
    )


def _ratios(
    cells: dict[Key, list[Run]], group: str, model: str, tasks: list[str], figures: dict[str, dict[str, float]]
) -> list[Row]:
    """Time per update divided by SAM's: the only part of this table that can be compared between machines."""
    rows = []
    for method in ("DeltaSAM", "PerInstanceSAM"):
        found = {}
        for task in tasks:
            slow, fast = (cells.get((task, model, name), []) for name in (method, "SAM"))
            paired = [(a, b) for a in slow for b in fast if a.seed == b.seed and a.device == b.device]
            values = tuple((a.train_seconds / a.steps) / (b.train_seconds / b.steps) for a, b in paired)
            theirs = [figures.get(name, {}).get(task) for name in (method, "SAM")]
            ratio = theirs[0] / theirs[1] if theirs[0] is not None and theirs[1] else None
            found[task] = Cell(values, ratio)
        if any(cell.values or cell.paper is not None for cell in found.values()):
            rows.append(Row(group, f"{method} / SAM", f"{method_name(method)} / SAM, per update", found))
    return rows


def _methods(keys: Iterable[Key], figures: dict[str, dict[str, float]]) -> list[str]:
    return sorted({method for _, _, method in keys} | set(figures), key=method_order)
