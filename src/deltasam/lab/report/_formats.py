"""Writes tables as Markdown, LaTeX, CSV, and for the terminal.

Not with pandas: importing it takes a second, and its writers of Markdown and LaTeX know no headings inside a table.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deltasam.lab.report._table import Column, Row, Spread, Table, table_notes

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "δ": r"$\delta$", "ρ": r"$\rho$", "η": r"$\eta$", "±": r"$\pm$", "−": r"$-$", "–": "--", "≈": r"$\approx$",
    "[": "{[}", "]": "{]}",
}  # fmt: skip


def to_markdown(table: Table, *, spread: Spread = "std", paper: bool = True) -> str:
    """Returns the table in Markdown, with our best number of each column and group in bold."""
    width = len(table.columns)
    rows = [["method", *(markdown_text(column.header) for column in table.columns)], ["---", *["---:"] * width]]
    for line in table.lines(spread=spread, paper=paper):
        mark = {"group": "**", "ours": ""}.get(line.kind, "*")
        cells = [f"**{markdown_text(c)}**" if n in line.best else markdown_text(c) for n, c in enumerate(line.cells)]
        rows.append([f"{mark}{markdown_text(line.label)}{mark}", *(cells or [""] * width)])
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    notes = "\n".join(f"- {markdown_text(note)}" for note in table_notes(table))
    return f"{markdown_text(table.heading(paper=paper))}\n\n{text}\n\n{notes}\n"


def to_latex(table: Table, *, spread: Spread = "std", paper: bool = True) -> str:
    """Returns the table in LaTeX for a document that uses the package booktabs; plain ASCII."""
    width = len(table.columns)
    out = [
        r"\begin{table*}[t]", r"\centering\small", rf"\begin{{tabular}}{{l{'r' * width}}}", r"\toprule",
        " & ".join(["Method", *(latex_text(column.header) for column in table.columns)]) + r" \\",
    ]  # fmt: skip
    for line in table.lines(spread=spread, paper=paper):
        label = latex_text(line.label)
        if line.kind == "group":
            out += [r"\midrule", rf"\multicolumn{{{width + 1}}}{{l}}{{\textbf{{{label}}}}} \\"]
        else:
            cells = [
                rf"\textbf{{{latex_text(c)}}}" if n in line.best else latex_text(c) for n, c in enumerate(line.cells)
            ]
            out.append(" & ".join([label if line.kind == "ours" else rf"\textit{{{label}}}", *cells]) + r" \\")
    caption = " ".join([table.heading(paper=paper), *table_notes(table)])
    out += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{latex_text(caption)}}}", r"\end{table*}"]
    return "\n".join(out) + "\n"


def to_csv(table: Table) -> str:
    """Returns one line per cell with all its statistics."""
    rows = [_statistics(table, row, column) for row in table.rows for column in table.columns]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value != value else value for name, value in row.items()} for row in rows)  # no nan
    return out.getvalue()


def _statistics(table: Table, row: Row, column: Column) -> dict[str, Any]:
    cell = row.cells[column.key]
    aggregate, theirs = table.aggregate_of(column), table.paper_aggregate_of(column)
    names = {"mean": "mean", "median": "median", "max": "max", "std": "std", "ci_low": "low", "ci_high": "high"}
    return {
        "table": table.name,
        "group": row.group,
        "method": row.method,
        "column": column.key,
        "aggregate": aggregate,
        "ours": cell.ours(aggregate),
        "n": len(cell.values),
        **{name: getattr(cell.summary, attribute, None) for name, attribute in names.items()},
        "values": " ".join(map(repr, cell.values)),
        "paper": cell.paper,
        "paper_aggregate": theirs if cell.paper is not None else "",
        "difference": cell.difference(theirs),
        "source": table.source.table if cell.paper is not None else "",
        "evaluation": cell.evaluation if cell.values else "",
    }


def terminal_parts(table: Table, width: int, *, spread: Spread = "std", paper: bool = True) -> list[RichTable]:
    """Splits the table into parts that fit the terminal, each with the names of the methods.

    rich would shrink the first column of a wide table until no name is left.
    """
    from rich.console import Console

    parts: list[list[int]] = [[]]
    for number in range(len(table.columns)):
        wider = _part(table, [*parts[-1], number], spread=spread, paper=paper)
        if parts[-1] and Console(width=10_000).measure(wider).maximum > width:
            parts.append([])
        parts[-1].append(number)
    return [_part(table, numbers, spread=spread, paper=paper) for numbers in parts]


def _part(table: Table, numbers: Sequence[int], *, spread: Spread, paper: bool) -> RichTable:
    """Some of the columns. Only the part with the first column has the title."""
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(table.heading(paper=paper), style="bold") if 0 in numbers or not numbers else None
    shown = RichTable(title=title, title_justify="left", box=None)
    shown.add_column("method", no_wrap=True)
    for number in numbers:
        shown.add_column(Text(table.columns[number].header), justify="right", no_wrap=True)
    for line in table.lines(spread=spread, paper=paper):
        style = {"group": "bold", "ours": "", "paper": "dim", "difference": "dim italic"}[line.kind]
        cells = [Text(line.cells[n], style="bold green" if n in line.best else style) for n in numbers if line.cells]
        shown.add_row(Text(line.label if line.kind == "group" else f"  {line.label}", style=style), *cells)
    return shown


def markdown_text(text: str) -> str:
    """Escapes the signs that Markdown would interpret."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))


def latex_text(text: str) -> str:
    """Escapes the signs that LaTeX would interpret; the result is ASCII."""
    text = "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
    return text.encode("ascii", "replace").decode()
