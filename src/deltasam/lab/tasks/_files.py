"""Reads rows from a file: JSON Lines, CSV, TSV or Parquet, with or without gzip."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from deltasam.lab.tasks._data import DataError, Row

#: File endings that :func:`read_rows` reads, in the order of the search.
ENDINGS = (".jsonl.gz", ".jsonl", ".parquet", ".csv", ".csv.gz", ".tsv", ".tsv.gz")

_SEPARATORS = (",", ";", "\t", "|")
_LONGEST_CELL = 2**31 - 1  # a C long on every platform


def read_rows(path: Path) -> list[Row]:
    """Returns all rows of a file; a missing file, an unknown ending or damaged content raises a DataError."""
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(f"{path}: there is no such file{where}")
    ending = next((ending for ending in ENDINGS if path.name.endswith(ending)), None)
    if ending is None:
        raise DataError(f"{path}: unknown file ending; use one of {', '.join(ENDINGS)}")
    try:
        if ending == ".parquet":
            from pyarrow import parquet

            return list(parquet.read_table(path).to_pylist())
        data = path.read_bytes()
        text = (gzip.decompress(data) if ending.endswith(".gz") else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 ({error}); save it as UTF-8, in Excel as 'CSV UTF-8'") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:  # ValueError: not Parquet
        raise DataError(f"{path}: cannot be read ({error})") from error
    if ending.startswith(".jsonl"):
        return list(_json_lines(path, text))
    return _table(path, text, "\t" if ending.startswith(".tsv") else ",")


def _json_lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: must be a JSON object with the columns as keys, not {row!r}")
        yield row


def _table(path: Path, text: str, delimiter: str) -> list[Row]:
    """Returns the rows of a CSV file. Python's limit of 131,072 characters per cell is too low for articles."""
    first = text.partition("\n")[0]
    if delimiter not in first and (mark := next(filter(first.__contains__, _SEPARATORS), None)):
        raise DataError(
            f"{path}: columns are separated by {mark!r}, not {delimiter!r}; use commas, or tabs in a .tsv file"
        )
    limit = csv.field_size_limit(_LONGEST_CELL)
    # Strict: otherwise an unclosed quote turns the rest of the file into one text.
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = list(filter(None, reader.fieldnames or ()))
        rows: list[Row] = list(reader)
    except csv.Error as error:
        raise DataError(
            f"{path}: a quote in or before line {reader.reader.line_num} is not closed, or not doubled ({error}); fix "
            "it, or use JSON Lines (.jsonl)"
        ) from error
    finally:
        csv.field_size_limit(limit)
    if len(set(header)) < len(header):
        raise DataError(f"{path}: the header {header} contains a column twice")
    for index, row in enumerate(rows):
        beyond = row.pop(None, ())  # type: ignore[call-overload] # DictReader collects extra cells under None
        if any(beyond):
            raise DataError(
                f"{path}: row {index} has {len(row) + len(beyond)} cells, the header {len(row)}; put cells that "
                f"contain a {delimiter!r} in quotes"
            )
    return rows
