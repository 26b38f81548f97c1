"""The report: one page of HTML with its styles, script and figures inside."""

from __future__ import annotations

from collections.abc import Sequence

from deltasam.lab.report._figures import look
from deltasam.lab.report._names import method_name, method_order
from deltasam.lab.report._runs import Runs
from deltasam.lab.report._sections import SECTIONS, PageRuns, Section, all_runs
from deltasam.lab.report._table import Table, table_notes


def html_report(runs: Runs, tables: Sequence[Table], *, title: str = "Runs") -> str:
    """Returns the page. It loads nothing, and all names and texts of the runs are escaped.

    Args:
        runs: The runs.
        tables: The paper's tables. Those without any of our runs are left out.
        title: The heading.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    shown = PageRuns(runs)
    made = [*(make(shown) for make in SECTIONS), *map(_paper_table, tables), all_runs(shown)]
    methods = sorted({method for _, _, method in shown.cells}, key=method_order)
    environment = Environment(
        loader=PackageLoader(__package__, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html").render(
        title=title,
        sections=[section for section in made if section is not None],
        legend=[(look(method), method_name(method)) for method in methods],
    )


def _paper_table(table: Table) -> Section | None:
    """A table of the paper, if any of its cells has a run."""
    if not any(cell.values for row in table.rows for cell in row.cells.values()):
        return None
    title = f"The paper's table: {table.name}"
    return Section(name=table.name, title=title, table=table, lines=table_notes(table), template="paper_table.html")
