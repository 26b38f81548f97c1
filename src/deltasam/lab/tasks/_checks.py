"""Checks of columns, texts and labels before training. The error names the first wrong row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from deltasam.lab.tasks._data import DataError, Row
from deltasam.step.names import suggest

_HIDDEN = (
    "the label is hidden (-1) or negative: this split has no public labels; use the validation split, or number your "
    "classes from 0"
)
_MANY_CLASSES = 1000  # plausible even for a small sample of rows
_MANY_SCORES = 20  # more different fractions than this are scores, not names of classes


def check_columns(rows: Sequence[Row], columns: Sequence[str], origin: str) -> None:
    """Raises a DataError for a missing column, with the most similar column as a hint."""
    for index, row in enumerate(rows):
        for column in columns:
            if column not in row:
                hint = suggest(column, map(repr, row))
                raise DataError(f"{origin}: there is no column {column!r} in row {index}; {hint}")


def check_texts(rows: Sequence[Row], columns: Sequence[str], origin: str, *, allow_empty: bool = False) -> None:
    """Raises a DataError for a text that is missing (None, NaN), empty, not a string, or not valid Unicode."""
    for index, row in enumerate(rows):
        for column in columns:
            value = row[column]
            if _is_missing(value):
                raise DataError(f"{origin}: column {column!r} is missing (NaN) in row {index}; drop such rows")
            if not isinstance(value, str):
                raise DataError(f"{origin}: column {column!r} in row {index} must be text, not {value!r}")
            if not allow_empty and not value.strip():
                raise DataError(f"{origin}: column {column!r} is empty in row {index}; drop such rows")
            _check_unicode(value, f"{origin}: column {column!r} in row {index}")


def class_labels(
    rows: Sequence[Row], column: str, classes: Sequence[str], origin: str, *, inferred: bool = False
) -> list[int]:
    """Returns the labels as numbers 0..C-1, from numbers or from names of classes; a wrong label raises a DataError.

    ``inferred`` names come from :func:`infer_classes`, in alphabetical order: a number cannot be the index of a class.
    """
    index_of = {name: index for index, name in enumerate(classes)}
    are_numbered = all(name == str(index) for name, index in index_of.items())
    by_index = are_numbered or not (inferred or any(map(_is_finite, classes)))
    labels = []
    for row_index, row in enumerate(rows):
        value, where = row[column], f"{origin}: column {column!r} in row {row_index}"
        _check_label(value, where)
        number = _number(value)
        if _name(value) in index_of:
            labels.append(index_of[_name(value)])
        elif number is None or not by_index:
            raise DataError(f"{where}: label {value!r} is none of the classes {', '.join(classes)}")
        elif number == -1:
            raise DataError(f"{where}: {_HIDDEN}")
        elif number not in range(len(classes)):
            raise DataError(
                f"{where}: label {value!r} is out of range, the {len(classes)} classes are 0..{len(classes) - 1}"
            )
        else:
            labels.append(int(number))
    return labels


def infer_classes(rows: Sequence[Row], column: str, origin: str) -> tuple[str, ...]:
    """Returns the classes of a dataset that does not name them: 0..max for integers, else the sorted names.

    A missing label, fewer than two classes, or too many for the number of rows raise a DataError.
    """
    where = f"{origin}: column {column!r}"
    values = [row[column] for row in rows]
    for index, value in enumerate(values):
        _check_label(value, f"{where} in row {index}")
        if isinstance(value, str):
            _check_unicode(value, f"{where} in row {index}")
            if value.strip().lower() in ("", "nan"):  # how spreadsheets and pandas write missing values
                raise DataError(f"{where} in row {index}: the label is missing; drop such rows, or set task.classes")
    numbers = [number for number in map(_number, values) if number is not None and number.is_integer()]
    are_numbered = len(numbers) == len(values)
    if are_numbered:
        largest = int(max(numbers))
        if largest < 0:
            raise DataError(f"{where} in row 0: {_HIDDEN}")
        count, most, example = largest + 1, max(_MANY_CLASSES, 2 * len(values)), str(largest)
    else:
        found = sorted({_name(value) for value in values})
        _check_spaces(found, where)
        plausible = _MANY_SCORES if all(map(_is_finite, found)) else _MANY_CLASSES
        count, most, example = len(found), max(plausible, len(values) // 2), found[0]
    if count > most:
        raise DataError(
            f"{where} has labels such as {example}, which would be {count} classes for {len(values)} rows; choose "
            "another column (task.label=...), use --task regression for scores, or name the classes (task.classes=...)"
        )
    if count < 2:
        raise DataError(f"{where} has only the class {example!r}; there is nothing to learn")
    return tuple(map(str, range(count))) if are_numbered else tuple(found)


def scores(rows: Sequence[Row], column: str, origin: str) -> list[float]:
    """Returns the labels of a regression; a label that is not a finite number raises a DataError."""
    for index, row in enumerate(rows):
        if not _is_finite(row[column]):
            raise DataError(f"{origin}: column {column!r} in row {index} must be a finite number, not {row[column]!r}")
    return [float(row[column]) for row in rows]


def _check_label(value: Any, where: str) -> None:
    if isinstance(value, (list, tuple, dict, set)):
        raise DataError(f"{where}: a label is one name or number, not {value!r}; choose the column by task.label=...")
    if _is_missing(value):
        raise DataError(f"{where}: the label is missing; drop such rows")


def _check_spaces(names: Sequence[str], where: str) -> None:
    """Raises a DataError for two names that differ only in spaces around them: usually one class."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(name.strip(), name)) != name:
            raise DataError(
                f"{where} has the labels {other!r} and {name!r}, which differ only in spaces; remove the spaces, or "
                "name the classes (task.classes=...)"
            )


def _check_unicode(text: str, where: str) -> None:
    """Raises a DataError for a lone surrogate, which JSON can contain but no tokenizer or file can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has half a character (the lone surrogate {text[error.start]!r} at position {error.start}); "
            "remove it, or drop the row"
        ) from error


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _name(value: Any) -> str:
    """Returns the name of a class: 1 and 1.0 are one class."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _is_finite(value: Any) -> bool:
    number = _number(value)
    return number is not None and math.isfinite(number)


def _number(value: Any) -> float | None:
    """Returns the value as a number, or None if it is not one."""
    try:
        return float(value)
    except OverflowError:  # an integer with more than 308 digits
        return math.inf
    except (TypeError, ValueError):
        return None
