"""Labels of a dataset: the classes, the number of each class, and scores for regression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from deltasam.lab.tasks._checks import check_unicode
from deltasam.lab.tasks._data import DataError, Row

_HIDDEN = (
    "the label is hidden (-1): this split has no public labels; use the validation split, or number your own classes "
    "from 0"
)
_MANY_CLASSES = 1000  # plausible even for a small sample of rows
_MANY_SCORES = 20  # more different fractions than this are scores, not names of classes


def class_labels(
    rows: Sequence[Row], column: str, classes: Sequence[str], origin: str, *, inferred: bool = False
) -> list[int]:
    """Returns the labels as numbers 0..C-1, from numbers or from names of classes.

    Args:
        rows: The rows of a split.
        column: The column with the label.
        classes: The names of the classes, in the order of their numbers.
        origin: Where the rows come from.
        inferred: The names come from :func:`infer_classes`. Their order is alphabetical, so that a number cannot be
            the index of a class.

    Raises:
        DataError: A label is missing, hidden, out of range, or not the name of a class.
    """
    index_of = {name: index for index, name in enumerate(classes)}
    by_index = _are_numbered(classes) or not (inferred or any(map(_is_finite, classes)))
    return [
        _class_label(row[column], index_of, f"{origin}: column {column!r} in row {i}", by_index=by_index)
        for i, row in enumerate(rows)
    ]


def _are_numbered(classes: Sequence[str]) -> bool:
    return all(name == str(index) for index, name in enumerate(classes))


def _class_label(value: Any, index_of: dict[str, int], where: str, *, by_index: bool) -> int:
    """Returns the index of a label; ``by_index``: a number that is not a name may be the index itself."""
    _check_scalar(value, where)
    if isinstance(value, str) and value in index_of:
        return index_of[value]
    number = _number(value)
    if number is not None and math.isnan(number):
        raise DataError(f"{where}: the label is missing (NaN); drop such rows")
    if _name(value) in index_of:
        return index_of[_name(value)]
    if number is None or not by_index:
        raise DataError(f"{where}: label {value!r} is none of the classes {', '.join(index_of)}")
    if number == -1:
        raise DataError(f"{where}: {_HIDDEN}")
    if not _is_finite(number) or number != int(number) or not 0 <= number < len(index_of):
        raise DataError(
            f"{where}: label {value!r} is out of range, the {len(index_of)} classes are 0..{len(index_of) - 1}"
        )
    return int(number)


def scores(rows: Sequence[Row], column: str, origin: str) -> list[float]:
    """Returns the labels of a regression.

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
    """Returns the classes of a dataset that does not name them: 0..max for whole numbers, else the sorted names.

    Raises:
        DataError: There are fewer than two classes or far more than rows, or a label is missing or no label.
    """
    where = f"{origin}: column {column!r}"
    values = [row[column] for row in rows]
    for index, value in enumerate(values):
        _check_present(value, f"{where} in row {index}")
    numbers = [_number(value) for value in values]
    whole = [number for number in numbers if number is not None and _is_finite(number) and number == int(number)]
    if len(whole) == len(values):
        names = _numbered_classes(whole, where)
    else:
        names = tuple(sorted({_name(value) for value in values}))
        _check_repeated(names, len(values), where)
    if len(names) < 2:
        raise DataError(f"{where} has only the class {names[0]!r}; there is nothing to learn")
    return names


def _numbered_classes(numbers: Sequence[float], where: str) -> tuple[str, ...]:
    """Returns the classes 0..max, unless the largest number is too large for a class."""
    row = max(range(len(numbers)), key=lambda index: numbers[index])
    count = int(numbers[row]) + 1
    if count <= 0:
        raise DataError(f"{where} in row {row}: {_HIDDEN if count == 0 else 'labels are numbered from 0'}")
    if count > max(_MANY_CLASSES, 2 * len(numbers)):
        raise DataError(
            f"{where} in row {row}: label {count - 1} would make {count} classes for {len(numbers)} rows; is this the "
            "column with the labels (task.label=...)? If it is, number them from 0 without gaps, or name them"
        )
    return tuple(map(str, range(count)))


def _check_present(value: Any, where: str) -> None:
    """Refuses an empty cell or the word nan, with which spreadsheets and pandas mark missing values."""
    _check_scalar(value, where)
    number = _number(value)
    word = value.strip() if isinstance(value, str) else None
    if word == "" or (number is not None and math.isnan(number)):
        remedy = f", or name the classes if {word!r} is one of them: task.classes=[...]" if word else ""
        raise DataError(f"{where}: the label is missing; drop such rows{remedy}")
    if word is not None:
        check_unicode(value, where)


def _check_scalar(value: Any, where: str) -> None:
    if isinstance(value, (list, tuple, dict, set)):
        raise DataError(
            f"{where}: a label is one name or number, not {value!r}; choose the right column (task.label=...), or "
            "give each row one label"
        )


def _check_repeated(names: Sequence[str], rows: int, where: str) -> None:
    """Refuses a column with a different label in almost every row: scores, texts or row numbers."""
    if 2 * len(names) <= rows:
        return
    problem = f"{where} has {len(names)} different labels in {rows} rows, such as {names[0]!r}"
    remedy = "to use them as classes, name them: task.classes=[...]"
    if len(names) > _MANY_SCORES and all(map(_is_finite, names)):
        raise DataError(f"{problem}; for scores use --task regression; {remedy}")
    if len(names) > _MANY_CLASSES:
        raise DataError(f"{problem}; is this the column with the labels (task.label=...)? {remedy.capitalize()}")


def _name(value: Any) -> str:
    """Returns the name of a class: 1 and 1.0 are one class."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _is_finite(value: Any) -> bool:
    number = _number(value)
    return number is not None and math.isfinite(number)


def _number(value: Any) -> float | None:
    """Returns the value as a number: None if it is not one, NaN if it is missing."""
    try:
        return float(value)
    except OverflowError:  # an integer with more than 308 digits
        return float("inf")
    except (TypeError, ValueError):
        return float("nan") if value is None else None
