"""A table of results beside the paper's: what it holds, before anybody asks how it is written down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from deltasam.lab.report import paper
from deltasam.lab.report._summary import Summary, summarize

AGGREGATES = ("mean", "median", "max")
MISSING = "no run"
NOT_IN_PAPER = "–"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column.

    Attributes:
        key: Its name in the data.
        header: Its heading.
        aggregate: How several runs become one number here; None for what the table says.
        paper_aggregate: How the paper does; None for what the table says.
        lower_is_better: Whether less is better.
        decimals: Digits after the point; None for as many as the number has.
    """

    key: str
    header: str
    aggregate: str | None = None
    paper_aggregate: str | None = None
    lower_is_better: bool = False
    decimals: int | None = 1


@dataclass(frozen=True)
class Cell:
    """Our runs and the paper's figure for one method in one column.

    Attributes:
        values: One value per seed; empty where there is no run.
        paper: The paper's figure, or None.
        evaluation: How our runs were evaluated, where that is not the standard of the task; it is marked by a star.
        columns: The cells it is the average of, as the paper's is: of their numbers, whatever seeds each of them has.
    """

    values: tuple[float, ...] = ()
    paper: float | None = None
    evaluation: str = ""
    columns: tuple[Cell, ...] = ()

    @cached_property
    def summary(self) -> Summary | None:
        """Statistics of our runs, or None."""
        return summarize(self.values) if self.values else None

    def ours(self, aggregate: str) -> float | None:
        """Our number, or None."""
        if self.columns:
            numbers = [number for cell in self.columns if (number := cell.ours(aggregate)) is not None]
            return fmean(numbers) if len(numbers) == len(self.columns) else None
        return None if self.summary is None else float(getattr(self.summary, aggregate))

    def difference(self, aggregate: str) -> float | None:
        """Ours minus the paper's, both of the paper's aggregate, or None; a best is that of as many runs as it has."""
        ours = self.first(paper.RUNS).ours(aggregate) if aggregate == "max" else self.ours(aggregate)
        return None if ours is None or self.paper is None else ours - self.paper

    def first(self, runs: int) -> Cell:
        """The cell with its first so many runs."""
        columns = tuple(cell.first(runs) for cell in self.columns)
        return Cell(self.values[:runs], self.paper, self.evaluation, columns)


@dataclass(frozen=True)
class Row:
    """A method of a group.

    Attributes:
        group: The model.
        method: The method as results name it.
        label: The method as people write it.
        cells: Its cells by the key of their column.
    """

    group: str
    method: str
    label: str
    cells: dict[str, Cell]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table.

    Attributes:
        name: Its name on the command line.
        title: What it shows.
        columns: Its columns.
        rows: Its rows, those of a group next to each other.
        aggregate: How our runs of a cell become one number.
        paper_aggregate: How the paper's do.
        source: The paper's table.
        notes: What must be known to read it.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    aggregate: str
    paper_aggregate: str
    source: str
    notes: tuple[str, ...] = field(default=())

    def aggregate_of(self, column: Column) -> str:
        """How our runs become one number in this column."""
        return column.aggregate or self.aggregate

    def paper_aggregate_of(self, column: Column) -> str:
        """How the paper's do; where it does not say it, as ours."""
        named = column.paper_aggregate or self.paper_aggregate
        return named if named in AGGREGATES else self.aggregate_of(column)

    def groups(self) -> Iterator[tuple[str, list[Row]]]:
        """The rows by group."""
        for group in dict.fromkeys(row.group for row in self.rows):
            yield group, [row for row in self.rows if row.group == group]

    def best(self, rows: Sequence[Row], column: Column) -> float | None:
        """Our best number in this column among the rows, where there are at least two to compare."""
        numbers = [
            number
            for row in rows
            if (number := row.cells.get(column.key, Cell()).ours(self.aggregate_of(column))) is not None
        ]
        if len(numbers) < 2:
            return None
        return min(numbers) if column.lower_is_better else max(numbers)
