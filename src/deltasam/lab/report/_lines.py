"""A table as lines of text: for each method what we found, what the paper has, and the difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deltasam.lab.report._table import MISSING, NOT_IN_PAPER, Cell, Column, Row, Table
from deltasam.lab.report.paper import RUNS

Kind = Literal["group", "ours", "paper", "difference"]
Spread = Literal["std", "ci", "none"]


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        kind: What it holds.
        label: Its first cell.
        cells: The others.
        best: Which of them are our best of their group.
    """

    kind: Kind
    label: str
    cells: tuple[str, ...] = ()
    best: tuple[bool, ...] = ()


def lines(table: Table, *, spread: Spread = "std", paper: bool = True) -> Iterator[Line]:
    """The lines of a table.

    Args:
        table: The table.
        spread: What stands beside our mean: standard deviation, 95% bootstrap interval, or nothing.
        paper: Whether the paper's figures and the differences are shown; without them methods without a run are left
            out, too.

    Yields:
        Per group its heading, then per method one to three lines.
    """
    for group, listed in table.groups():
        rows = [row for row in listed if paper or any(cell.values for cell in row.cells.values())]
        if not rows:
            continue
        yield Line("group", group)
        best = [table.best(rows, column) for column in table.columns]
        for row in rows:
            cells = [row.cells.get(column.key, Cell()) for column in table.columns]
            numbers = [
                cell.ours(table.aggregate_of(column)) for cell, column in zip(cells, table.columns, strict=True)
            ]
            yield Line(
                "ours",
                row.label,
                tuple(_ours(table, c, k, spread) for c, k in zip(cells, table.columns, strict=True)),
                tuple(n is not None and n == b for n, b in zip(numbers, best, strict=True)),
            )
            if paper and any(cell.paper is not None for cell in cells):
                yield from _papers(table, row, cells)


def heading(table: Table, *, paper: bool = True) -> str:
    """What the table shows, with the aggregates named."""
    ours = ", ".join(dict.fromkeys(table.aggregate_of(column) for column in table.columns))
    theirs = f"; paper: {table.source}, {table.paper_aggregate}" if paper else ""
    return f"{table.title}. Ours: {ours} over seeds{theirs}."


def number(value: float, column: Column, *, sign: bool = False) -> str:
    """A number as the column shows it."""
    if column.decimals is None:
        return f"{value:+g}" if sign else f"{value:g}"
    text = f"{value:+.{column.decimals}f}" if sign else f"{value:.{column.decimals}f}"
    return text.replace("-", "−")


def _ours(table: Table, cell: Cell, column: Column, spread: Spread) -> str:
    found, aggregate = cell.summary, table.aggregate_of(column)
    ours = cell.ours(aggregate)
    if ours is None:
        return MISSING
    text = number(ours, column)
    if found is None:  # an average over columns with other seeds each
        return text + "*" * bool(cell.evaluation)
    if aggregate == "mean" and found.n > 1 and spread == "std":
        text += f" ±{number(found.std, column)}"
    elif aggregate == "mean" and found.n > 1 and spread == "ci":
        text += f" [{number(found.low, column)}, {number(found.high, column)}]"
    text += "*" if cell.evaluation else ""
    return text if found.n == _usual(table) else f"{text} (n={found.n})"


def _papers(table: Table, row: Row, cells: list[Cell]) -> Iterator[Line]:
    columns = table.columns
    figures = [NOT_IN_PAPER if c.paper is None else number(c.paper, k) for c, k in zip(cells, columns, strict=True)]
    yield Line("paper", f"{row.label}, paper", tuple(figures))
    found = [cell.difference(table.paper_aggregate_of(column)) for cell, column in zip(cells, columns, strict=True)]
    if any(value is not None for value in found):
        texts = ["" if v is None else number(v, k, sign=True) for v, k in zip(found, columns, strict=True)]
        used = ", ".join(dict.fromkeys(table.paper_aggregate_of(column) for column in columns))
        if any(len(cell.values) > RUNS for cell in cells):
            used = used.replace("max", f"max of the first {RUNS} seeds")
        yield Line("difference", f"{row.label}, our {used} − paper", tuple(texts))


def _usual(table: Table) -> int:
    """The most frequent number of seeds; only other numbers are written into the cells."""
    counts = [len(cell.values) for row in table.rows for cell in row.cells.values() if cell.values]
    return max(set(counts), key=lambda n: (counts.count(n), n)) if counts else 0


def usual_note(table: Table) -> str:
    """How many seeds a cell has where it does not say it."""
    count = _usual(table)
    return f"n = {count} where a cell does not say otherwise." if count else "There are no runs for this table yet."
