"""How a run was evaluated. Runs that differ in it share neither a table cell nor a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from deltasam.step.names import pluralized


class Evaluation(NamedTuple):
    """How the metrics of a run were computed."""

    split: str  #: Split.
    metric: str  #: Primary metric.
    sample: int | None = None  #: Size of the sample that the configuration asks for; None for the whole split.
    rows: int | None = None  #: Rows evaluated; None where unknown or irrelevant.
    data: str = ""  #: File or dataset of the rows; empty where irrelevant.

    @property
    def is_part(self) -> bool:
        """Whether it used a part of a split, such as ``train[90%:]``. Such runs choose settings."""
        return self.split.endswith("]")

    def difference(self, other: Evaluation) -> str:
        """Describes how it differs from another, such as ``on a sample of 256 rows``; empty if it does not."""
        parts = []
        if self.split != other.split:
            parts.append(f"on {self.split}")
        same_rows = self.sample == other.sample and (None in (self.rows, other.rows) or self.rows == other.rows)
        if not self.is_part and not same_rows:  # a part of a split is never shown
            parts.append(self._rows())
        if self.metric != other.metric:
            parts.append(f"by {self.metric}")
        if not self._same_data(other):
            parts.append(f"with {self.data}")
        return ", ".join(parts)

    def is_like(self, other: Evaluation) -> bool:
        """Whether split, metric and data are the same, on any number of rows."""
        return self[:2] == other[:2] and self._same_data(other)

    def _same_data(self, other: Evaluation) -> bool:
        return "" in (self.data, other.data) or self.data == other.data

    def _rows(self) -> str:
        if self.sample is None:
            return "on all rows" if self.rows is None else f"on {pluralized(self.rows, 'row')}"
        evaluated = f" ({self.rows})" if self.rows not in (None, self.sample) else ""
        return f"on a sample of {pluralized(self.sample, 'row')}{evaluated}"


# The paper's tasks as `deltasam.lab.tasks` defines them; a test compares the two. Not imported from there, since this
# package does not import torch. The seven sets of mirror have no common number of rows.
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
    """Returns the standard evaluation of each task: the paper's, or else the preferred one among the runs."""
    counts: dict[str, Counter[Evaluation]] = {}
    for task, evaluation in found:
        counts.setdefault(task, Counter())[evaluation] += 1
    return {
        task: STANDARD.get(task) or max(times, key=lambda one: preference(one, times[one]))
        for task, times in counts.items()
    }


def preference(evaluation: Evaluation, runs: int) -> tuple[bool, bool, int, int, str]:
    """Sorting key of the evaluations of a task: whole splits first, then the most runs."""
    return not evaluation.is_part, evaluation.sample is None, runs, evaluation.rows or 0, repr(evaluation)
