"""The data of a task: rows, splits, and the error for data that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


class DataError(ValueError):
    """A dataset, split, column, label or model is missing or wrong. Raised before any training."""


@dataclass(frozen=True)
class Split:
    """The rows of a split as they are stored, and the file or hub dataset that they come from."""

    rows: list[Row]
    origin: str


@dataclass(frozen=True)
class OtherSet:
    """Rows that another task or file provides for the evaluation.

    Attributes:
        rows: The rows, with the columns of the task that is trained, and labels that number ``classes``.
        origin: Where they come from.
        classes: The classes of these rows.
    """

    rows: list[Row]
    origin: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Data:
    """Checked rows, ready to be encoded.

    Attributes:
        splits: The rows by split.
        origins: The file or hub dataset of each split.
        classes: Names of the classes, in the order of their numbers. Empty if the task has none.
        general: General texts on which forgetting is measured. Empty if the task does not measure it.
        others: Other sets to evaluate on, by name.
    """

    splits: dict[str, list[dict[str, Any]]]
    origins: dict[str, str]
    classes: tuple[str, ...] = ()
    general: tuple[str, ...] = ()
    others: dict[str, OtherSet] = field(default_factory=dict)
