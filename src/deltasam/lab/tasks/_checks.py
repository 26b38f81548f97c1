"""Checks of the rows before any training: columns, texts, labels. The first wrong row is named."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any

from deltasam.lab.tasks._errors import DataError
from deltasam.lab.tasks._files import Row

_HIDDEN = (
    "the label is hidden (-1): this split has no public labels; use the validation split, or number classes of your "
    "own from 0"
)
_MANY_CLASSES = 1000  # so many are plausible even of a small sample of rows
_MANY_SCORES = 20  # so many fractions are no names of classes


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
            if len(row) == 1 and (other := next((mark for mark in ";|\t" if mark in next(iter(row))), None)):
                hint = f"its header is {next(iter(row))!r}: separate the cells by commas, not by {other!r}"
            raise DataError(f"{origin}: there is no column {column!r} in row {index}; {hint}")


def check_texts(rows: Sequence[Row], columns: Sequence[str], origin: str, *, allow_empty: bool = False) -> None:
    """Raises a DataError for a text that is missing (None, NaN), not a string, or holds half a character.

    Args:
        rows: The rows of a split.
        columns: The columns of texts.
        origin: Where the rows came from.
        allow_empty: Take empty texts: published datasets have a few, and everyone trains on them.
    """
    for index, row in enumerate(rows):
        for column in columns:
            value = row[column]
            if value is None or (isinstance(value, float) and math.isnan(value)):
                raise DataError(f"{origin}: column {column!r} is missing (NaN) in row {index}; drop such rows")
            if not isinstance(value, str):
                raise DataError(f"{origin}: column {column!r} in row {index} must be text, not {value!r}")
            if not allow_empty and not value.strip():
                raise DataError(f"{origin}: column {column!r} is empty in row {index}; drop such rows")
            _check_characters(value, f"{origin}: column {column!r} in row {index}")


def _check_characters(text: str, where: str) -> None:
    """JSON can write one half of a pair of surrogates, which no tokenizer takes and no file can store."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start : error.end]
        raise DataError(
            f"{where} has half a character (the surrogate {half[0]!r} at position {error.start}), left over where "
            "a text was cut or wrongly decoded; remove it there, or drop the row"
        ) from error


def class_labels(
    rows: Sequence[Row], column: str, classes: Sequence[str], origin: str, *, inferred: bool = False
) -> list[int]:
    """The labels as numbers 0..C-1, from numbers or from the names of the classes.

    Args:
        rows: The rows of a split.
        column: The column of the label.
        classes: The names, in the order of their numbers.
        origin: Where the rows came from.
        inferred: The names were found by :func:`infer_classes`: their order is the alphabet's, which nobody numbered
            labels by, so that a number is never taken for a place among them.

    Raises:
        DataError: A label is missing, hidden, out of range, or no name of a class.
    """
    index_of = {name: index for index, name in enumerate(classes)}
    places = _are_places(classes, inferred=inferred)
    return [
        _class_label(row[column], index_of, f"{origin}: column {column!r} in row {i}", places=places)
        for i, row in enumerate(rows)
    ]


def _are_places(classes: Sequence[str], *, inferred: bool) -> bool:
    """Whether a number may be a place among the classes; not where numbers are names, such as 1 to 5 stars."""
    if all(name == str(index) for index, name in enumerate(classes)):
        return True
    return not inferred and not any(_is_finite(name) for name in classes)


def _class_label(value: Any, index_of: dict[str, int], where: str, *, places: bool) -> int:
    _check_one(value, where)
    if isinstance(value, str) and value in index_of:
        return index_of[value]
    number = _number(value)
    if number is not None and math.isnan(number):
        raise DataError(f"{where}: the label is missing (NaN); drop such rows")
    if _name(value) in index_of:
        return index_of[_name(value)]
    if number is None or not places:
        raise DataError(f"{where}: label {value!r} is none of the classes {', '.join(index_of)}")
    if number == -1:
        raise DataError(f"{where}: {_HIDDEN}")
    if not _is_finite(number) or number != int(number) or not 0 <= number < len(index_of):
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
        DataError: There are fewer than two or far more than rows, or a label is missing or no label.
    """
    for index, row in enumerate(rows):
        _check_given(row[column], f"{origin}: column {column!r} in row {index}")
    values = [row[column] for row in rows]
    numbers = [_number(value) for value in values]
    whole = [number for number in numbers if number is not None and _is_finite(number) and number == int(number)]
    if len(whole) == len(values):
        names = _numbered(whole, f"{origin}: column {column!r}")
    else:
        names = tuple(sorted({_name(value) for value in values}))
        _check_names(names, len(values), f"{origin}: column {column!r}")
    if len(names) < 2:
        raise DataError(f"{origin}: column {column!r} has the one class {names[0]!r}; there is nothing to learn")
    return names


def _check_given(value: Any, where: str) -> None:
    """An empty cell or the word nan, as spreadsheets and pandas write what is missing, would become a class."""
    _check_one(value, where)
    number = _number(value)
    word = value.strip() if isinstance(value, str) else None
    if word == "" or (number is not None and math.isnan(number)):
        way_out = f", or name the classes if {word!r} is one: task.classes=[...]" if word else ""
        raise DataError(f"{where}: the label is missing; drop such rows{way_out}")
    if word is not None:
        _check_characters(value, where)


def _check_one(value: Any, where: str) -> None:
    if isinstance(value, (list, tuple, dict, set)):
        raise DataError(
            f"{where}: a label is one name or number, not {value!r}; name the right column (task.label=...), or write "
            "one label for each row"
        )


def _numbered(numbers: Sequence[float], where: str) -> tuple[str, ...]:
    """The classes 0..max, unless one number is so large that it cannot be the number of a class."""
    row = max(range(len(numbers)), key=lambda index: numbers[index])
    count = int(numbers[row]) + 1
    if count <= 0:
        raise DataError(f"{where} in row {row}: {_HIDDEN if count == 0 else 'labels are numbered from 0'}")
    if count > max(_MANY_CLASSES, 2 * len(numbers)):
        raise DataError(
            f"{where} in row {row}: label {count - 1} would make {count} classes of {len(numbers)} rows; is this the "
            "column of the labels (task.label=...)? If it is, number them from 0 without gaps, or name them"
        )
    return tuple(map(str, range(count)))


def _check_names(names: Sequence[str], rows: int, where: str) -> None:
    """A column of scores, of texts or of numbers of rows has a label of its own in almost every row."""
    if 2 * len(names) <= rows:
        return
    told = f"{where} has {len(names)} different labels in {rows} rows, such as {names[0]!r}"
    named = "if they are classes, name them: task.classes=[...]"
    if len(names) > _MANY_SCORES and all(map(_is_finite, names)):
        raise DataError(f"{told}; scores are for --task regression; {named}")
    if len(names) > _MANY_CLASSES:
        raise DataError(f"{told}; is this the column of the labels (task.label=...)? {named[0].upper()}{named[1:]}")


def _name(value: Any) -> str:
    """How a class is called: 1 and 1.0 are one class."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _is_finite(value: Any) -> bool:
    number = _number(value)
    return number is not None and math.isfinite(number)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return float("inf")
    except (TypeError, ValueError):
        return float("nan") if value is None else None
