"""A table of our results next to the paper's: its content, and its lines as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Literal

from deltasam.lab.report._statistics import Summary, summarize
from deltasam.lab.report.paper import RUNS, Source

AGGREGATES = ("mean", "median", "max")
MISSING = "no run"
NOT_IN_PAPER = "–"

Spread = Literal["std", "ci", "none"]
"""What follows a mean: standard deviation, 95% bootstrap interval, or nothing."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table."""

    key: str  #: Name in the data.
    header: str  #: Heading.
    aggregate: str | None = None  #: How our runs become one number; None for the table's aggregate.
    paper_aggregate: str | None = None  #: How the paper's do; None for the table's.
    lower_is_better: bool = False  #: Whether less is better.
    decimals: int | None = 1  #: Digits after the point; None for as many as needed.

    def text(self, value: float, *, sign: bool = False) -> str:
        """Formats a number of this column."""
        plus = "+" if sign else ""
        if self.decimals is None:
            return f"{value:{plus}g}"
        return f"{value:{plus}.{self.decimals}f}".replace("-", "−")


@dataclass(frozen=True)
class Cell:
    """Our runs and the paper's figure for one method in one column."""

    values: tuple[float, ...] = ()  #: One value per seed; empty where there is no run.
    paper: float | None = None  #: The paper's figure.
    evaluation: str = ""  #: Our evaluation where it is not the standard one; marked by a star.
    columns: tuple[Cell, ...] = ()  #: Cells to average, as the paper does, whatever seeds each of them has.

    @cached_property
    def summary(self) -> Summary | None:
        """Statistics of our runs, or None if there is none."""
        return summarize(self.values) if self.values else None

    def ours(self, aggregate: str) -> float | None:
        """Our number, or None."""
        if self.columns:
            numbers = [number for cell in self.columns if (number := cell.ours(aggregate)) is not None]
            return fmean(numbers) if len(numbers) == len(self.columns) else None
        return None if self.summary is None else float(getattr(self.summary, aggregate))

    def difference(self, aggregate: str) -> float | None:
        """Ours minus the paper's, or None. A maximum is taken over as many runs as the paper has."""
        ours = self._first(RUNS).ours(aggregate) if aggregate == "max" else self.ours(aggregate)
        return None if ours is None or self.paper is None else ours - self.paper

    def _first(self, runs: int) -> Cell:
        return Cell(self.values[:runs], columns=tuple(cell._first(runs) for cell in self.columns))


@dataclass(frozen=True)
class Row:
    """A method in a group of rows."""

    group: str  #: The model.
    method: str  #: The method as results name it.
    label: str  #: The method's name to display.
    cells: dict[str, Cell]  #: Cells by column key.


@dataclass(frozen=True)
class Line:
    """A line of a table as text."""

    kind: Literal["group", "ours", "paper", "difference"]  #: What it holds.
    label: str  #: First cell.
    cells: tuple[str, ...] = ()  #: The other cells.
    best: tuple[int, ...] = ()  #: Indices of the cells that are our best of their group.


@dataclass(frozen=True)
class Table:
    """A table."""

    name: str  #: Name on the command line.
    title: str  #: What it shows.
    columns: tuple[Column, ...]  #: Columns.
    rows: tuple[Row, ...]  #: Rows, sorted by group.
    aggregate: str  #: How the runs of a cell become one number.
    source: Source  #: The paper's table.
    notes: tuple[str, ...] = ()  #: Explanations below the table.

    def aggregate_of(self, column: Column) -> str:
        """How our runs become one number in a column."""
        return column.aggregate or self.aggregate

    def paper_aggregate_of(self, column: Column) -> str:
        """How the paper's runs do. Falls back to our aggregate where the paper names none."""
        named = column.paper_aggregate or self.source.aggregate
        return named if named in AGGREGATES else self.aggregate_of(column)

    @cached_property
    def usual_seeds(self) -> int:
        """The most frequent number of seeds of a cell, 0 without runs. Cells name theirs only if it differs."""
        counts = [len(cell.values) for row in self.rows for cell in row.cells.values() if cell.values]
        return max(set(counts), key=lambda n: (counts.count(n), n)) if counts else 0

    def heading(self, *, paper: bool = True) -> str:
        """What the table shows, with the aggregates."""
        ours = ", ".join(dict.fromkeys(map(self.aggregate_of, self.columns)))
        theirs = f"; paper: {self.source.table}, {self.source.aggregate}" if paper else ""
        return f"{self.title}. Ours: {ours} over seeds{theirs}."

    def lines(self, *, spread: Spread = "std", paper: bool = True) -> Iterator[Line]:
        """Yields the lines: for each group its heading, then one to three lines per method.

        Args:
            spread: What follows a mean.
            paper: Whether to show the paper's figures, the differences, and methods without runs.
        """
        for group in dict.fromkeys(row.group for row in self.rows):
            rows = [row for row in self.rows if row.group == group]
            rows = [row for row in rows if paper or any(cell.values for cell in row.cells.values())]
            if rows:
                yield Line("group", group)
                best = [self._best(rows, column) for column in self.columns]
                for row in rows:
                    yield from self._lines_of(row, best, spread=spread, paper=paper)

    def _best(self, rows: Sequence[Row], column: Column) -> float | None:
        """Our best number in a column, if there are at least two to compare."""
        ours = [row.cells[column.key].ours(self.aggregate_of(column)) for row in rows]
        numbers = [number for number in ours if number is not None]
        if len(numbers) < 2:
            return None
        return min(numbers) if column.lower_is_better else max(numbers)

    def _lines_of(self, row: Row, best: list[float | None], *, spread: Spread, paper: bool) -> Iterator[Line]:
        cells = [(column, row.cells[column.key]) for column in self.columns]
        ours = [cell.ours(self.aggregate_of(column)) for column, cell in cells]
        are_best = tuple(n for n, number in enumerate(ours) if number is not None and number == best[n])
        yield Line("ours", row.label, tuple(self._text(column, cell, spread) for column, cell in cells), are_best)
        if not paper or all(cell.paper is None for _, cell in cells):
            return
        figures = [NOT_IN_PAPER if cell.paper is None else column.text(cell.paper) for column, cell in cells]
        yield Line("paper", f"{row.label}, paper", tuple(figures))
        found = [(column, cell.difference(self.paper_aggregate_of(column))) for column, cell in cells]
        if any(value is not None for _, value in found):
            used = ", ".join(dict.fromkeys(map(self.paper_aggregate_of, self.columns)))
            if any(len(cell.values) > RUNS for _, cell in cells):
                used = used.replace("max", f"max of the first {RUNS} seeds")
            texts = ["" if value is None else column.text(value, sign=True) for column, value in found]
            yield Line("difference", f"{row.label}, our {used} − paper", tuple(texts))

    def _text(self, column: Column, cell: Cell, spread: Spread) -> str:
        found, aggregate = cell.summary, self.aggregate_of(column)
        ours = cell.ours(aggregate)
        if ours is None:
            return MISSING
        text, star = column.text(ours), "*" if cell.evaluation else ""
        if found is None:  # an average over columns with different seeds
            return text + star
        if aggregate == "mean" and found.n > 1 and spread == "std":
            text += f" ±{column.text(found.std)}"
        elif aggregate == "mean" and found.n > 1 and spread == "ci":
            text += f" [{column.text(found.low)}, {column.text(found.high)}]"
        return text + star + ("" if found.n == self.usual_seeds else f" (n={found.n})")


def table_notes(table: Table) -> list[str]:
    """Returns the notes below a table, starting with the number of seeds."""
    count = table.usual_seeds
    usual = f"n = {count} where a cell does not say otherwise." if count else "There are no runs for this table yet."
    return [usual, *table.notes]
