"""The base class of all tasks."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltasam.lab.tasks._data import Data, DataError, Row, Split
from deltasam.lab.tasks._measured import Measured
from deltasam.lab.tasks._source import DataSource
from deltasam.objectives import Objective
from deltasam.step.checks import check_number

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Item = dict[str, Any]
Collator = Callable[[list[Item]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Data, encoding, objective and metrics of an experiment. A task is its own configuration, like a method.

    Attributes:
        name: Name of the task.
        metrics: Names of the reported metrics. The first one is the primary metric.
        max_length: Longest input in tokens. Longer inputs are truncated.
        train_split: The split to train on.
        eval_split: The split to evaluate on, during and after training.
        train_rows: Size of a fixed random sample to train on. None for all rows.
        eval_rows: Size of a fixed random sample to evaluate on. None for all rows.
    """

    name: str
    metrics: tuple[str, ...] = ()
    max_length: int = 128
    train_split: str = "train"
    eval_split: str = "validation"
    train_rows: int | None = None
    eval_rows: int | None = None

    def __post_init__(self) -> None:
        for option in ("max_length", "train_rows", "eval_rows"):
            if getattr(self, option) is not None:
                check_number(f"task.{option}", getattr(self, option), 1, whole=True)
        if self.reported and not (self.metrics and set(self.metrics) <= set(self.reported)):
            raise ValueError(
                f"task.metrics={list(self.metrics)} must name metrics of {self.name}: {', '.join(self.reported)}"
            )

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of the metrics that :meth:`evaluate` can report. Empty if they are not known in advance."""
        return ()

    @property
    def primary(self) -> str:
        """The metric for comparing runs."""
        return self.metrics[0]

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the primary metric is better."""
        return True

    @property
    def data_note(self) -> str:
        """The source of the data, for ``deltasam list tasks``."""
        return "defined by a plugin"

    def load(self, source: DataSource, splits: Sequence[str] | None = None) -> Data:
        """Reads and checks the splits. Defaults to those for training and evaluation.

        Raises:
            DataError: A file, split, column or label is missing or wrong.
        """
        wanted = (self.train_split, self.eval_split) if splits is None else tuple(splits)
        found = {split: self.read(source, split) for split in dict.fromkeys(wanted)}
        for split in found.values():
            if not split.rows:
                raise DataError(f"{split.origin}: the split is empty")
        origins = {name: split.origin for name, split in found.items()}
        return self.check({name: self.sampled(name, split.rows) for name, split in found.items()}, origins)

    @abstractmethod
    def read(self, source: DataSource, split: str) -> Split:
        """Returns the rows of one split as they are stored."""

    @abstractmethod
    def check(self, splits: dict[str, list[Row]], origins: dict[str, str]) -> Data:
        """Returns the rows in the form that :meth:`encode` takes, or raises a DataError."""

    @abstractmethod
    def model(self, path: str, data: Data, **options: Any) -> Any:
        """Returns the pretrained model with the head of this task, initialised from torch's global generator."""

    @abstractmethod
    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> list[Item]:
        """Returns the rows as items of a training set. ``seed`` is that of the run, for random encodings."""

    def encoded_rows(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Row]:
        """Returns the rows that :meth:`encode` does not leave out. By default all."""
        return list(rows)

    @abstractmethod
    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """Returns a function that joins items into the batch that the objective takes."""

    @abstractmethod
    def objective(self) -> Objective:
        """Returns the objective, which computes one loss per instance of such a batch."""

    @abstractmethod
    def evaluate(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> dict[str, float]:
        """Returns all metrics of the model on the rows, in eval mode. Restores the training mode afterwards."""

    def initial(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Data) -> dict[str, float]:
        """Returns what is measured once before training. By default nothing."""
        return {}

    def final(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        data: Data,
        rows: Sequence[dict[str, Any]],
        *,
        before: Mapping[str, float],
        batch_size: int = 32,
    ) -> Measured:
        """Returns what is measured once after training, in addition to :meth:`evaluate`. By default nothing.

        Args:
            model: The trained model.
            tokenizer: Its tokenizer.
            data: The data of the run.
            rows: The rows to evaluate on.
            before: What :meth:`initial` returned. Empty if it is not known.
            batch_size: Instances per batch.
        """
        return Measured()

    def stressed(self, data: Data, seed: int) -> Data:
        """Returns the data of a run with this seed: a task may train on fewer rows, or on wrong labels."""
        return data

    def sampled(self, split: str, rows: list[Row]) -> list[Row]:
        """Returns a fixed random sample of the rows if the task limits their number, else all rows."""
        limit = {self.train_split: self.train_rows, self.eval_split: self.eval_rows}.get(split)
        if limit is None or limit >= len(rows):
            return rows
        kept = sorted(random.Random(0).sample(range(len(rows)), limit))
        return [rows[index] for index in kept]


def batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """Yields the items in order, in lists of ``size``."""
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[torch.device]:
    """Switches to eval mode without gradients and restores the mode afterwards; yields the model's device."""
    import torch

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(training)
