"""What a run was evaluated on and by: runs that differ in it cannot stand in one cell, nor in one test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from deltasam.step.names import counted


class Evaluation(NamedTuple):
    """How the metrics of a run came about.

    Attributes:
        split: The split.
        metric: The primary metric.
        sample: Size of the sample that the configuration asks for; None for the whole split.
        rows: Rows that were evaluated; None where it is not known or does not matter.
        data: The file or the dataset that the rows came from; empty where it does not matter.
    """

    split: str
    metric: str
    sample: int | None = None
    rows: int | None = None
    data: str = ""

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a split, such as ``train[90%:]``: that chose the settings, on other rows."""
        return self.split.endswith("]")


# Split, metric, rows and dataset of the paper's tasks, as `deltasam.lab.tasks` has them; a test compares them. Not taken
# from there: this package is read without torch. The seven sets of mirror have no one number of rows.
STANDARD: dict[str, Evaluation] = {
    "mnli": Evaluation("validation_matched", "accuracy", rows=9815, data="mnli"),
    "qqp": Evaluation("validation", "accuracy", rows=40430, data="qqp"),
    "rte": Evaluation("validation", "accuracy", rows=277, data="rte"),
    "qnli": Evaluation("validation", "accuracy", rows=5463, data="qnli"),
    "mrpc": Evaluation("validation", "accuracy", rows=408, data="mrpc"),
    "cola": Evaluation("validation", "matthews", rows=1043, data="cola"),
    "sst2": Evaluation("validation", "accuracy", rows=872, data="sst2"),
    "stsb": Evaluation("validation", "pearson", rows=1500, data="stsb"),
    "mirror": Evaluation("test", "sts_average"),
    "cnn_dailymail": Evaluation("validation", "rouge1", rows=13368, data="cnn_dailymail"),
}


def usual(found: Iterable[tuple[str, Evaluation]]) -> dict[str, Evaluation]:
    """The evaluation of each task that goes without saying: the paper's, or else the most frequent one.

    Args:
        found: Task and evaluation of every run.
    """
    counts: dict[str, Counter[Evaluation]] = {}
    for task, evaluation in found:
        counts.setdefault(task, Counter())[evaluation] += 1
    return {
        task: STANDARD.get(task) or max(times, key=lambda one: preference(one, times[one]))
        for task, times in counts.items()
    }


def preference(evaluation: Evaluation, runs: int) -> tuple[bool, bool, int, int, str]:
    """Which of several evaluations stands for a task: whole splits first, then the one of the most runs."""
    return not evaluation.is_part, evaluation.sample is None, runs, evaluation.rows or 0, repr(evaluation)


def same_rows(one: Evaluation, other: Evaluation) -> bool:
    """Whether as many rows were evaluated, drawn in the same way; numbers that are not known do not count."""
    return one.sample == other.sample and (None in (one.rows, other.rows) or one.rows == other.rows)


def same_kind(one: Evaluation, other: Evaluation) -> bool:
    """Whether split, metric and data are the same, on however many rows."""
    return one[:2] == other[:2] and ("" in (one.data, other.data) or one.data == other.data)


def words(one: Evaluation, reference: Evaluation) -> str:
    """In what an evaluation differs from another, as in ``on a sample of 256 rows``; empty if in nothing."""
    told = []
    if one.split != reference.split:
        told.append(f"on {one.split}")
    if not one.is_part and not same_rows(one, reference):  # a part of a split is never shown, and says enough
        told.append(_rows(one))
    if one.metric != reference.metric:
        told.append(f"by {one.metric}")
    if "" not in (one.data, reference.data) and one.data != reference.data:
        told.append(f"with {one.data}")
    return ", ".join(told)


def _rows(one: Evaluation) -> str:
    if one.sample is None:
        return "on all rows" if one.rows is None else f"on {counted(one.rows, 'row')}"
    return f"on a sample of {counted(one.sample, 'row')}" + (
        f" ({one.rows})" if one.rows not in (None, one.sample) else ""
    )
