"""Rows of a table in a file: JSON Lines, CSV, TSV or Parquet, with gzip or without."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deltasam.lab.tasks._errors import DataError

Row = dict[str, Any]

#: File endings that :func:`read_rows` reads, in the order they are looked for.
ENDINGS = (".jsonl.gz", ".jsonl", ".parquet", ".csv", ".csv.gz", ".tsv", ".tsv.gz")

_LONGEST_CELL = 2**31 - 1  # what a C long holds everywhere


def read_rows(path: Path) -> list[Row]:
    r"""All rows of a file as dictionaries.

    Raises:
        DataError: The file is missing, of an unknown kind, or damaged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "train.csv"
        ...     _ = path.write_text("text,label\nfine,1\n")
        ...     read_rows(path)
        [{'text': 'fine', 'label': '1'}]
    """
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(f"{path}: there is no such file{where}")
    ending = next((ending for ending in ENDINGS if path.name.endswith(ending)), None)
    if ending is None:
        raise DataError(f"{path}: cannot tell the kind of this file, it should end in one of {', '.join(ENDINGS)}")
    try:
        if ending == ".parquet":
            return _parquet(path)
        data = path.read_bytes()
        text = (gzip.decompress(data) if ending.endswith(".gz") else data).decode("utf-8-sig")
        if ending.startswith(".jsonl"):
            return list(_json_lines(path, text))
        delimiter = "\t" if ending.startswith(".tsv") else ","
        return _table(path, text, delimiter)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read ({error}); save it as UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _json_lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, line {number}: a row must be a JSON object with the columns as keys, not {row!r}"
            )
        yield row


def _table(path: Path, text: str, delimiter: str) -> list[Row]:
    """The rows of a CSV; its reader refuses cells of more than 131,072 characters, and whole articles are longer."""
    limit = csv.field_size_limit(_LONGEST_CELL)
    # Strict: a quote that is never closed would make one text of the rest of the file.
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = list(filter(None, reader.fieldnames or ()))
        rows: list[Row] = list(reader)
    except csv.Error as error:
        raise DataError(
            f"{path}: a quote in or before line {reader.reader.line_num} is not closed, or not doubled ({error}); put "
            "cells that hold a quote in quotes and double it, or write JSON Lines (.jsonl)"
        ) from error
    finally:
        csv.field_size_limit(limit)
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: the column {twice!r} stands twice in the header")
    for index, row in enumerate(rows):
        beyond = row.pop(None, ())  # type: ignore[call-overload] # the key that DictReader has for what is too much
        if any(beyond):
            raise DataError(
                f"{path}: row {index} has {len(row) + len(beyond)} cells, the header {len(row)}; put cells that hold "
                f"a {delimiter!r} in quotes"
            )
    return rows


def _parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file ({error})") from error
    return rows
