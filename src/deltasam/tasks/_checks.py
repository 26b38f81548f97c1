"""Checks of the rows before any training: columns, texts, labels. The first wrong row is named."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any

from deltasam.tasks._errors import DataError
from deltasam.tasks._files import Row


def check_rows(rows: Sequence[Row], origin: str) -> None:
    """Raises a DataError for a split without rows."""
    if not rows:
        raise DataError(f"{origin}: the split is empty")


def check_columns(rows: Sequence[Row], columns: Sequence[str], origin: str) -> None:
    """Raises a DataError for a column that is missing, naming the nearest one there is."""
    for index, row in enumerate(rows):
        for column in columns:
            if column in row:
                continue
            close = difflib.get_close_matches(column, list(row), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(repr, row))}"
            raise DataError(f"{origin}: there is no column {column!r} in row {index}; {hint}")


def check_texts(rows: Sequence[Row], columns: Sequence[str], origin: str) -> None:
    """Raises a DataError for a text that is missing (None, NaN) or not a string."""
    for index, row in enumerate(rows):
        for column in columns:
            value = row[column]
            if value is None or (isinstance(value, float) and math.isnan(value)):
                raise DataError(f"{origin}: column {column!r} is missing (NaN) in row {index}; drop such rows")
            if not isinstance(value, str):
                raise DataError(f"{origin}: column {column!r} in row {index} must be text, not {value!r}")


def class_labels(rows: Sequence[Row], column: str, classes: Sequence[str], origin: str) -> list[int]:
    """The labels as numbers 0..C-1, from numbers or from the names of the classes.

    Raises:
        DataError: A label is missing, hidden, out of range, or no name of a class.
    """
    index_of = {name: index for index, name in enumerate(classes)}
    return [
        _class_label(row[column], index_of, f"{origin}: column {column!r} in row {i}") for i, row in enumerate(rows)
    ]


def _class_label(value: Any, index_of: dict[str, int], where: str) -> int:
    if isinstance(value, str) and value in index_of:
        return index_of[value]
    number = _number(value)
    if number is None:
        raise DataError(f"{where}: label {value!r} is none of the classes {', '.join(index_of)}")
    if math.isnan(number):
        raise DataError(f"{where}: the label is missing (NaN); drop such rows")
    if number == -1:
        raise DataError(
            f"{where}: the label is hidden (-1): this split has no public labels; use the validation split"
        )
    if number != int(number) or not 0 <= number < len(index_of):
        raise DataError(
            f"{where}: label {value!r} is out of range, the {len(index_of)} classes are 0..{len(index_of) - 1}"
        )
    return int(number)


def scores(rows: Sequence[Row], column: str, origin: str) -> list[float]:
    """The labels of a regression.

    Raises:
        DataError: A label is missing, not a number, or not finite.
    """
    values = []
    for index, row in enumerate(rows):
        number = _number(row[column])
        if number is None or not math.isfinite(number):
            raise DataError(f"{origin}: column {column!r} in row {index} must be a finite number, not {row[column]!r}")
        values.append(number)
    return values


def infer_classes(rows: Sequence[Row], column: str, origin: str) -> tuple[str, ...]:
    """The classes of a dataset that does not name them: 0..max for whole numbers, else the sorted names.

    Raises:
        DataError: There are fewer than two, or a label is missing.
    """
    for index, row in enumerate(rows):
        if _is_missing(row[column]):  # an empty cell would become a class
            raise DataError(f"{origin}: column {column!r} in row {index}: the label is missing; drop such rows")
    values = {row[column] for row in rows}
    numbers = [_number(value) for value in values]
    if all(number is not None and math.isfinite(number) and number == int(number) for number in numbers):
        names = tuple(str(index) for index in range(1 + int(max(number for number in numbers if number is not None))))
    else:
        names = tuple(sorted(map(str, values)))
    if len(names) < 2:
        raise DataError(f"{origin}: column {column!r} has the one class {names[0]!r}; there is nothing to learn")
    return names


def _is_missing(value: Any) -> bool:
    nan = isinstance(value, float) and math.isnan(value)
    return value is None or nan or (isinstance(value, str) and not value.strip())


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan") if value is None else None
