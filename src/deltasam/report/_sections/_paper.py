"""A table of the paper next to our results."""

from __future__ import annotations

from deltasam.report._sections._base import Section
from deltasam.report._table import Table, table_notes


def paper_table(table: Table) -> Section | None:
    """The table with its notes, if any of its cells has a run."""
    if not table.has_runs:
        return None
    title = f"The paper's table: {table.name}"
    return Section(name=table.name, title=title, table=table, lines=table_notes(table), template="paper_table.html")
