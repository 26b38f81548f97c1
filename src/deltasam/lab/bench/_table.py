"""A table in the terminal, with rich if it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
    """Prints a title, a table whose first column is text and whose others are numbers, and notes below it."""
    if util.find_spec("rich") is None:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in [header, *rows]
        ]
        print(title, *lines, *notes, sep="\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=bool(index), overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe is as wide as the table
        console = Console(
            highlight=False, width=max(200, sum(map(len, header)) + max(len(row[0]) for row in rows) + 99)
        )
    for part in (title, table, *notes):
        console.print(part, markup=False)
