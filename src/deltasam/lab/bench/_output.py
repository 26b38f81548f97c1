"""Output of the benchmarks: a table in the terminal, with rich if it is installed, and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any

from deltasam.lab.bench._clock import Spread


def print_table(title: str, columns: Mapping[str, Sequence[str]], notes: Sequence[str]) -> None:
    """Prints a title, a table and notes. The first column is text, the others are numbers. Omits empty columns."""
    filled = {name: column for name, column in columns.items() if any(column)}
    rows = list(zip(*filled.values(), strict=True))
    if util.find_spec("rich") is None:
        widths = [max(map(len, (name, *column))) for name, column in filled.items()]
        lines = ["  ".join(map(str.ljust, row, widths)) for row in [tuple(filled), *rows]]
        print(title, *lines, *notes, sep="\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(filled):
        table.add_column(name, justify="right" if index else "left", no_wrap=bool(index), overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe is as wide as the table
        width = max(200, sum(map(len, filled)) + max((len(row[0]) for row in rows), default=0) + 99)
        console = Console(highlight=False, width=width)
    for part in (title, table, *notes):
        console.print(part, markup=False)


def spread_text(spread: Spread | None, form: str, scale: float = 1.0) -> str:
    """Formats a median with half the interquartile range; empty for None."""
    if spread is None:
        return ""
    return f"{spread.median * scale:{form}} ±{(spread.high - spread.low) / 2 * scale:{form}}"


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Writes a record to a file, in a folder that may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, default=str) + "\n")
