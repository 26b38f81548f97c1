"""What every task is: data, encoding, objective and metrics in one frozen record."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deltasam.lab.tasks._checks import check_rows
from deltasam.lab.tasks._files import Row
from deltasam.lab.tasks._source import DataSource, Split
from deltasam.objectives import Objective

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Item = dict[str, Any]
Collator = Callable[[list[Item]], dict[str, Any]]


@dataclass(frozen=True)
class Data:
    """Checked rows, ready to be encoded.

    Attributes:
        splits: The rows by split.
        origins: Where each split came from: a file or a place on the hub.
        classes: Names of the classes, in the order of their numbers; empty if the task has none.
    """

    splits: dict[str, list[Row]]
    origins: dict[str, str]
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Data, encoding, objective and metrics. Like a method, a task is its own configuration.

    Attributes:
        name: The name in the list of tasks.
        metrics: What is reported; the first is the primary metric.
        max_length: Longest input in tokens; what is longer is cut.
        train_split: Split to train on.
        eval_split: Split to evaluate on during and after training.
        train_rows: Train on a fixed random sample of this size; None for all rows.
        eval_rows: Evaluate on a fixed random sample of this size; None for all rows.
    """

    name: str
    metrics: tuple[str, ...] = field(default=())
    max_length: int = 128
    train_split: str = "train"
    eval_split: str = "validation"
    train_rows: int | None = None
    eval_rows: int | None = None

    def __post_init__(self) -> None:
        """Checks the options."""
        for option in ("max_length", "train_rows", "eval_rows"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ValueError(f"task.{option}={value} must be at least 1")
        if self.reported:
            self._check_metrics()

    def _check_metrics(self) -> None:
        """A metric that the evaluation does not report would be missed after the whole training."""
        there = f"there are {', '.join(self.reported)}"
        if not self.metrics:
            raise ValueError(f"task.metrics is empty; {there}")
        for metric in self.metrics:
            if metric not in self.reported:
                raise ValueError(f"task.metrics: {metric!r} is not a metric of {self.name}; {there}")

    @property
    def reported(self) -> tuple[str, ...]:
        """What :meth:`evaluate` can report, which ``metrics`` may name; empty if that is not known beforehand."""
        return ()

    @property
    def primary(self) -> str:
        """The metric that runs are compared by."""
        return self.metrics[0]

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the primary metric is better."""
        return True

    def load(self, source: DataSource, splits: Sequence[str] | None = None) -> Data:
        """Reads and checks the splits, by default those for training and evaluation.

        Raises:
            DataError: A file, split, column or label is missing or wrong.
        """
        wanted = (self.train_split, self.eval_split) if splits is None else tuple(splits)
        found = {split: self.read(source, split) for split in dict.fromkeys(wanted)}
        for split in found.values():
            check_rows(split.rows, split.origin)
        origins = {name: split.origin for name, split in found.items()}
        return self.check({name: self.sampled(name, split.rows) for name, split in found.items()}, origins)

    @abstractmethod
    def read(self, source: DataSource, split: str) -> Split:
        """The rows of one split as they are stored."""

    @abstractmethod
    def check(self, splits: dict[str, list[Row]], origins: dict[str, str]) -> Data:
        """The rows in the form :meth:`encode` takes, or a DataError."""

    @abstractmethod
    def model(self, path: str, data: Data, **options: Any) -> Any:
        """The pretrained model with the head this task needs; the head is drawn from torch's random stream."""

    @abstractmethod
    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> list[Item]:
        """The rows as items of a training set; ``seed`` is that of the run, for tasks that draw something."""

    @abstractmethod
    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """Joins items into the batch that the objective takes."""

    @abstractmethod
    def objective(self) -> Objective:
        """The losses of the instances of such a batch."""

    @abstractmethod
    def evaluate(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> dict[str, float]:
        """All metrics of the model on the rows, in eval mode; the mode is what it was before afterwards."""

    def sampled(self, split: str, rows: list[Row]) -> list[Row]:
        """A fixed random sample of the rows of a split, if the task takes only so many of them."""
        limit = {self.train_split: self.train_rows, self.eval_split: self.eval_rows}.get(split)
        if limit is None or limit >= len(rows):
            return rows
        kept = sorted(random.Random(0).sample(range(len(rows)), limit))
        return [rows[index] for index in kept]


def batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """The items in order, in lists of ``size``."""
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[torch.device]:
    """Eval mode without gradients; gives the model's device and puts the mode back."""
    import torch

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(training)
