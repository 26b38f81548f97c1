"""Tables as Markdown, LaTeX, CSV, and in the terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deltasam.lab.report._lines import Spread, heading, lines, usual_note
from deltasam.lab.report._table import Cell, Column, Row, Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

CSV_FIELDS = (
    "table", "group", "method", "column", "aggregate", "ours", "n", "mean", "median", "max", "std", "ci_low",
    "ci_high", "values", "paper", "paper_aggregate", "difference", "source", "evaluation",
)  # fmt: skip
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "δ": r"$\delta$", "ρ": r"$\rho$", "η": r"$\eta$", "±": r"$\pm$", "−": r"$-$", "–": "--", "≈": r"$\approx$",
    "[": "{[}", "]": "{]}",
}  # fmt: skip


def to_markdown(table: Table, *, spread: Spread = "std", paper: bool = True) -> str:
    """The table in Markdown, our best number of each column of a group in bold."""
    width = len(table.columns)
    rows = [
        ["method", *(_markdown(column.header) for column in table.columns)],
        ["---", *["---:"] * width],
    ]
    for line in lines(table, spread=spread, paper=paper):
        if line.kind == "group":
            rows.append([f"**{_markdown(line.label)}**", *[""] * width])
        elif line.kind == "ours":
            cells = [f"**{_markdown(c)}**" if b else _markdown(c) for c, b in zip(line.cells, line.best, strict=True)]
            rows.append([_markdown(line.label), *cells])
        else:
            rows.append([f"*{_markdown(line.label)}*", *(_markdown(cell) for cell in line.cells)])
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    notes = "\n".join(f"- {_markdown(note)}" for note in (usual_note(table), *table.notes))
    return f"{_markdown(heading(table, paper=paper))}\n\n{text}\n\n{notes}\n"


def to_latex(table: Table, *, spread: Spread = "std", paper: bool = True) -> str:
    """The table in LaTeX, for a document that uses the package booktabs; plain ASCII."""
    width = len(table.columns)
    out = [
        r"\begin{table*}[t]", r"\centering\small", rf"\begin{{tabular}}{{l{'r' * width}}}", r"\toprule",
        " & ".join(["Method", *(_latex(column.header) for column in table.columns)]) + r" \\",
    ]  # fmt: skip
    for line in lines(table, spread=spread, paper=paper):
        if line.kind == "group":
            out += [r"\midrule", rf"\multicolumn{{{width + 1}}}{{l}}{{\textbf{{{_latex(line.label)}}}}} \\"]
            continue
        cells = [_latex(cell) for cell in line.cells]
        if line.kind == "ours":
            cells = [rf"\textbf{{{c}}}" if best else c for c, best in zip(cells, line.best, strict=True)]
            label = _latex(line.label)
        else:
            label = rf"\textit{{{_latex(line.label)}}}"
        out.append(" & ".join([label, *cells]) + r" \\")
    caption = " ".join([heading(table, paper=paper), usual_note(table), *table.notes])
    out += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{_latex(caption)}}}", r"\end{table*}"]
    return "\n".join(out) + "\n"


def to_csv(table: Table) -> str:
    """One line per cell with all its statistics; :func:`from_csv` reads it back."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_FIELDS, lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        for column in table.columns:
            writer.writerow(_csv_line(table, row, column, row.cells.get(column.key, Cell())))
    return out.getvalue()


def from_csv(text: str) -> list[dict[str, Any]]:
    """The lines of :func:`to_csv` with numbers as numbers; None where there is none."""
    numeric = {"ours", "mean", "median", "max", "std", "ci_low", "ci_high", "paper", "difference"}
    found: list[dict[str, Any]] = []
    for line in csv.DictReader(io.StringIO(text)):
        read: dict[str, Any] = {k: (float(v) if v else None) if k in numeric else v for k, v in line.items()}
        read["n"] = int(line["n"])
        read["values"] = tuple(float(value) for value in line["values"].split())
        found.append(read)
    return found


def to_terminal(table: Table, *, spread: Spread = "std", paper: bool = True) -> RichTable:
    """The table for :mod:`rich`; :func:`~deltasam.lab.report.table_notes` go below it."""
    return _part(table, range(len(table.columns)), spread=spread, paper=paper)


def terminal_parts(table: Table, width: int, *, spread: Spread = "std", paper: bool = True) -> list[RichTable]:
    """The table in parts no wider than the terminal, each with the names of the methods.

    Of a table that is too wide rich takes the width from the first column, until no name is left.
    """
    parts: list[list[int]] = [[]]
    for number in range(len(table.columns)):
        wider = _part(table, [*parts[-1], number], spread=spread, paper=paper)
        if parts[-1] and _width(wider) > width:
            parts.append([])
        parts[-1].append(number)
    return [_part(table, numbers, spread=spread, paper=paper) for numbers in parts]


def _width(shown: RichTable) -> int:
    from rich.console import Console

    return Console(width=10_000).measure(shown).maximum


def _part(table: Table, numbers: Sequence[int], *, spread: Spread, paper: bool) -> RichTable:
    """Some of the columns; below the first ones the title is not repeated."""
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(heading(table, paper=paper), style="bold") if 0 in numbers or not numbers else None
    shown = RichTable(title=title, title_justify="left", box=None)
    shown.add_column("method", no_wrap=True)
    for number in numbers:
        shown.add_column(Text(table.columns[number].header), justify="right", no_wrap=True)
    for line in lines(table, spread=spread, paper=paper):
        style = {"group": "bold", "ours": "", "paper": "dim", "difference": "dim italic"}[line.kind]
        best = line.best or (False,) * len(line.cells)
        cells = [Text(line.cells[n], style="bold green" if best[n] else style) for n in numbers if line.cells]
        shown.add_row(Text(line.label if line.kind == "group" else f"  {line.label}", style=style), *cells)
    return shown


def table_notes(table: Table) -> list[str]:
    """What must be known to read the table."""
    return [usual_note(table), *table.notes]


def _csv_line(table: Table, row: Row, column: Column, cell: Cell) -> dict[str, Any]:
    found, aggregate, theirs = cell.summary, table.aggregate_of(column), table.paper_aggregate_of(column)
    return {
        "table": table.name,
        "group": row.group,
        "method": row.method,
        "column": column.key,
        "aggregate": aggregate,
        "ours": _exact(cell.ours(aggregate)),
        "n": len(cell.values),
        **{name: _exact(getattr(found, name, None)) for name in ("mean", "median", "max", "std")},
        "ci_low": _exact(getattr(found, "low", None)),
        "ci_high": _exact(getattr(found, "high", None)),
        "values": " ".join(map(repr, cell.values)),
        "paper": _exact(cell.paper),
        "paper_aggregate": theirs if cell.paper is not None else "",
        "difference": _exact(cell.difference(theirs)),
        "source": table.source if cell.paper is not None else "",
        "evaluation": cell.evaluation if cell.values else "",
    }


def _exact(value: float | None) -> str:
    return "" if value is None or value != value else repr(value)


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))


def _latex(text: str) -> str:
    text = "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
    return text.encode("ascii", "replace").decode()
