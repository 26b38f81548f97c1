"""The tables of scores: GLUE, STS, summarization."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deltasam.report import paper
from deltasam.report._compare import comparison_notes
from deltasam.report._names import method_name, method_order, paper_model
from deltasam.report._runs import Run, Runs
from deltasam.report._select import RULE, by_cell
from deltasam.report._table import Cell, Column, Row, Table

_GLUE_HEADERS = {
    "mnli": "MNLI-m", "qqp": "QQP", "rte": "RTE", "qnli": "QNLI", "mrpc": "MRPC", "cola": "CoLA (Mcc)",
    "sst2": "SST-2", "stsb": "STS-B (r)",
}  # fmt: skip
_STS_HEADERS = {**{f"sts{y}": f"STS{y}" for y in range(12, 17)}, "stsb": "STS-B", "sickr": "SICK-R"}
_ROUGE_HEADERS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeLsum": "ROUGE-L"}
Finder = Callable[[str, str, str], dict[int, float]]
"""Model, method, column -> value by seed."""


def glue_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 1: eight tasks of GLUE."""
    cells = by_cell(runs.finished, lambda run: run.task in paper.GLUE_TASKS)

    def values(model: str, method: str, task: str) -> dict[int, float]:
        found = cells.get((task, model, method), [])
        return {run.seed: 100 * run.metrics[run.primary] for run in found}

    present = [(run.model, run.method) for found in cells.values() for run in found[:1]]
    columns = tuple(Column(key=task, header=_GLUE_HEADERS[task]) for task in paper.GLUE_TASKS)
    return _score_table("glue", "GLUE, development set", columns, runs, present, values, paper.GLUE, aggregate)


def sts_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 2: seven sets of semantic textual similarity."""
    cells = by_cell(runs.finished, lambda run: run.task == "mirror" and set(paper.STS_SETS) <= set(run.metrics))

    def values(model: str, method: str, dataset: str) -> dict[int, float]:
        return {run.seed: 100 * run.metrics[dataset] for run in cells.get(("mirror", model, method), [])}

    present = [(model, method) for _, model, method in cells]
    columns = tuple(Column(key=name, header=_STS_HEADERS[name], decimals=2) for name in paper.STS_SETS)
    title = "Self-supervised STS, Spearman"
    return _score_table("sts", title, columns, runs, present, values, paper.STS, aggregate, of_one_run=True)


def summarization_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 3: ROUGE on CNN/DailyMail."""
    cells = by_cell(runs.finished, lambda run: set(paper.ROUGE) <= set(run.metrics))
    tasks = {(model, method): task for task, model, method in cells}

    def values(model: str, method: str, metric: str) -> dict[int, float]:
        found = cells.get((tasks.get((model, method), ""), model, method), [])
        return {run.seed: 100 * run.metrics[metric] for run in found}

    columns = tuple(Column(key=name, header=_ROUGE_HEADERS[name], decimals=2) for name in paper.ROUGE)
    title = "CNN/DailyMail summarization"
    return _score_table(
        "summarization", title, columns, runs, list(tasks), values, paper.SUMMARIZATION, aggregate, average=False,
        of_one_run=True,
    )  # fmt: skip


def _score_table(
    name: str,
    title: str,
    columns: tuple[Column, ...],
    runs: Runs,
    present: Sequence[tuple[str, str]],
    values: Finder,
    source: paper.Source,
    aggregate: str,
    *,
    average: bool = True,
    of_one_run: bool = False,
) -> Table:
    rows, scores = [], {}
    for group, model, named in groups(name, [model for model, _ in present], source):
        own = {method for at, method in present if at == model}
        for method in sorted(own | set(source.figures.get(named, {})), key=method_order):
            figures = source.figures.get(named, {}).get(method, {})
            found = {column.key: values(model, method, column.key) for column in columns}
            cells = {key: Cell(tuple(numbers.values()), figures.get(key)) for key, numbers in found.items()}
            if average:
                cells = {"avg": Cell(_averages(found), figures.get("avg")), **cells}
            rows.append(Row(group, method, method_name(method), cells))
            scores[group, method] = found
    shown = (Column(key="avg", header="avg.", decimals=columns[0].decimals), *columns) if average else columns
    return Table(
        name=name,
        title=title,
        columns=shown,
        rows=tuple(rows),
        aggregate=aggregate,
        paper_aggregate=source.aggregate,
        source=source.table,
        notes=(*comparison_notes(scores, of_one_run=of_one_run), RULE, *runs.problems()),
    )


def groups(table: str, models: Sequence[str], source: paper.Source) -> list[tuple[str, str, str]]:
    """The groups of a table: heading, name of the model in our runs (empty if there is none), name in the paper.

    The paper's models come first. Two of ours that the paper has one name for, such as cased and uncased, stay apart.
    """
    ours = sorted(set(models))
    found = []
    for named in source.figures:
        same = [model for model in ours if paper_model(table, model) == named]
        found += [(f"{named} ({model})" if len(same) > 1 else named, model, named) for model in same or [""]]
    return found + [(model, model, "") for model in ours if paper_model(table, model) not in source.figures]


def _averages(found: dict[str, dict[int, float]]) -> tuple[float, ...]:
    """The average over the columns seed by seed; nothing where a column has other seeds than the rest."""
    seeds = {tuple(numbers) for numbers in found.values()}
    if len(seeds) != 1:
        return ()
    return tuple(sum(numbers[seed] for numbers in found.values()) / len(found) for seed in seeds.pop())


def primary_values(runs: Sequence[Run]) -> list[float]:
    """The primary metric of the runs, in percent."""
    return [100 * run.metrics[run.primary] for run in runs]
