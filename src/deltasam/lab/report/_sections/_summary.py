"""Summary: how much there is, comparisons of the methods, and what is missing."""

from __future__ import annotations

from deltasam.lab.report._compare import comparison_notes
from deltasam.lab.report._names import method_name, method_order
from deltasam.lab.report._runs import broken_measurements
from deltasam.lab.report._sections._base import PageRuns, Section
from deltasam.lab.report._select import Cells, select
from deltasam.step.names import pluralized


def summary(runs: PageRuns) -> Section:
    """Counts, tests and problems, in sentences."""
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
    """Scores are pooled in points. An error has the unit of its task and is compared for each task by itself."""
    less = {key: runs[0].primary for key, runs in cells.items() if not runs[0].higher_is_better}
    notes = comparison_notes(_scores({key: runs for key, runs in cells.items() if key not in less}, 100))
    for task, metric in sorted({(key[0], metric) for key, metric in less.items()}):
        of_task = {key: runs for key, runs in cells.items() if key in less and key[0] == task}
        notes += comparison_notes(_scores(of_task, -1), less_of=metric)
    return notes


def _scores(cells: Cells, scale: float) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    scores: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for (task, model, method), runs in cells.items():
        scores.setdefault((model, method), {})[task] = {run.seed: scale * run.score for run in runs}
    return scores
