"""Checks of columns and texts before training. The error names the first wrong row."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

from deltasam.lab.tasks._data import DataError, Row


def check_columns(rows: Sequence[Row], columns: Sequence[str], origin: str) -> None:
    """Raises a DataError for a missing column, with the most similar column as a hint."""
    for index, row in enumerate(rows):
        for column in columns:
            if column in row:
                continue
            close = difflib.get_close_matches(column, list(row), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the columns are {', '.join(map(repr, row))}"
            if len(row) == 1 and (other := next((mark for mark in ";|\t" if mark in next(iter(row))), None)):
                hint = f"its header is {next(iter(row))!r}: separate the cells by commas, not by {other!r}"
            raise DataError(f"{origin}: there is no column {column!r} in row {index}; {hint}")


def check_texts(rows: Sequence[Row], columns: Sequence[str], origin: str, *, allow_empty: bool = False) -> None:
    """Raises a DataError for a text that is missing (None, NaN), not a string, or not valid Unicode.

    Args:
        rows: The rows of a split.
        columns: The columns with texts.
        origin: Where the rows come from.
        allow_empty: Accept empty texts. Some published datasets contain a few.
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
            check_unicode(value, f"{origin}: column {column!r} in row {index}")


def check_unicode(text: str, where: str) -> None:
    """Raises a DataError for a lone surrogate, which JSON can contain but no tokenizer or file can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has half a character (the lone surrogate {text[error.start]!r} at position {error.start}), left "
            "over from a text that was cut or wrongly decoded; remove it, or drop the row"
        ) from error
