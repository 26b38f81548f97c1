"""The tables of scores: GLUE, STS, summarization."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deltasam.lab.report import paper
from deltasam.lab.report._compare import comparison_notes
from deltasam.lab.report._evaluation import STANDARD
from deltasam.lab.report._names import method_name, method_order, paper_model, short_models
from deltasam.lab.report._runs import Run, Runs
from deltasam.lab.report._select import RULE, Selection, select
from deltasam.lab.report._table import Cell, Column, Row, Table

_GLUE_HEADERS = {
    "mnli": "MNLI-m", "qqp": "QQP", "rte": "RTE", "qnli": "QNLI", "mrpc": "MRPC", "cola": "CoLA (Mcc)",
    "sst2": "SST-2", "stsb": "STS-B (r)",
}  # fmt: skip
_STS_HEADERS = {**{f"sts{y}": f"STS{y}" for y in range(12, 17)}, "stsb": "STS-B", "sickr": "SICK-R"}
_ROUGE_HEADERS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeLsum": "ROUGE-L"}
TASKS = {
    "glue": paper.GLUE_TASKS,
    "hyperparameters": paper.GLUE_TASKS,
    "sts": ("mirror",),
    "summarization": ("cnn_dailymail",),
}
"""The tasks of the tables that do not have all of them."""
Where = Callable[[str], tuple[str, str]]
"""Column -> the task whose runs fill it, and the metric."""


def glue_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 1: eight tasks of GLUE."""
    chosen = select(runs.finished, lambda run: run.task in paper.GLUE_TASKS)
    columns = tuple(Column(key=task, header=_GLUE_HEADERS[task]) for task in paper.GLUE_TASKS)

    def where(task: str) -> tuple[str, str]:
        return task, STANDARD[task].metric

    return _score_table("glue", "GLUE, development set", columns, runs, chosen, where, paper.GLUE, aggregate)


def sts_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 2: seven sets of semantic textual similarity."""
    chosen = select(runs.finished, lambda run: run.task == "mirror" and set(paper.STS_SETS) <= set(run.metrics))
    columns = tuple(Column(key=name, header=_STS_HEADERS[name], decimals=2) for name in paper.STS_SETS)

    def where(dataset: str) -> tuple[str, str]:
        return "mirror", dataset

    title = "Self-supervised STS, Spearman"
    return _score_table("sts", title, columns, runs, chosen, where, paper.STS, aggregate, of_one_run=True)


def summarization_table(runs: Runs, *, aggregate: str = "mean") -> Table:
    """Table 3: ROUGE on CNN/DailyMail, and on nothing else that has a ROUGE."""
    task = "cnn_dailymail"
    chosen = select(runs.finished, lambda run: run.task == task and set(paper.ROUGE) <= set(run.metrics))
    columns = tuple(Column(key=name, header=_ROUGE_HEADERS[name], decimals=2) for name in paper.ROUGE)

    def where(metric: str) -> tuple[str, str]:
        return task, metric

    title = "CNN/DailyMail summarization"
    return _score_table(
        "summarization", title, columns, runs, chosen, where, paper.SUMMARIZATION, aggregate, average=False,
        of_one_run=True,
    )  # fmt: skip


def _score_table(
    name: str,
    title: str,
    columns: tuple[Column, ...],
    runs: Runs,
    chosen: Selection,
    where: Where,
    source: paper.Source,
    aggregate: str,
    *,
    average: bool = True,
    of_one_run: bool = False,
) -> Table:
    rows, scores = [], {}
    present = {(model, method) for _, model, method in chosen.cells}
    for group, model, named in groups(name, [model for model, _ in present], source):
        own = {method for at, method in present if at == model}
        for method in sorted(own | set(source.figures.get(named, {})), key=method_order):
            figures = source.figures.get(named, {}).get(method, {})
            found = {column.key: _values(chosen, model, method, *where(column.key)) for column in columns}
            how = {column.key: chosen.unusual.get((where(column.key)[0], model), "") for column in columns}
            cells = {key: Cell(tuple(numbers.values()), figures.get(key), how[key]) for key, numbers in found.items()}
            if average:
                partly = "; ".join(dict.fromkeys(filter(None, how.values())))
                # The paper's is of its columns' best runs. The columns of one run have one seed's average instead.
                parts = () if of_one_run else tuple(cells.values())
                cells = {"avg": Cell(_averages(found), figures.get("avg"), partly, parts), **cells}
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
        notes=(*comparison_notes(scores, of_one_run=of_one_run), RULE, *chosen.notes, *runs.problems()),
    )


def _values(chosen: Selection, model: str, method: str, task: str, metric: str) -> dict[int, float]:
    """The metric by seed, in percent."""
    return {run.seed: 100 * run.metrics[metric] for run in chosen.cells.get((task, model, method), [])}


def groups(table: str, models: Sequence[str], source: paper.Source) -> list[tuple[str, str, str]]:
    """The groups of a table: heading, path of the model in our runs (empty if there is none), name in the paper.

    The paper's models come first. Two of ours that the paper has one name for, such as cased and uncased, stay apart.
    """
    ours = sorted(set(models))
    short = short_models(ours)
    found = []
    for named in source.figures:
        same = [model for model in ours if paper_model(table, model) == named]
        found += [(f"{named} ({short[model]})" if len(same) > 1 else named, model, named) for model in same or [""]]
    return found + [(short[model], model, "") for model in ours if paper_model(table, model) not in source.figures]


def _averages(found: dict[str, dict[int, float]]) -> tuple[float, ...]:
    """The average over the columns seed by seed; nothing where a column has other seeds than the rest."""
    seeds = {tuple(numbers) for numbers in found.values()}
    if len(seeds) != 1:
        return ()
    return tuple(sum(numbers[seed] for numbers in found.values()) / len(found) for seed in seeds.pop())


def primary_values(runs: Sequence[Run]) -> list[float]:
    """The primary metric of the runs, in percent."""
    return [100 * run.metrics[run.primary] for run in runs]
