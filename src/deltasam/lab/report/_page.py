"""The report: one page of HTML with its styles, script and figures inside."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deltasam.lab.report._compare import is_test
from deltasam.lab.report._figures import look
from deltasam.lab.report._names import method_name
from deltasam.lab.report._runs import Runs
from deltasam.lab.report._section import PageRuns, Section
from deltasam.lab.report._sections import SECTIONS, all_runs
from deltasam.lab.report._table import Table, table_notes
from deltasam.step.names import pluralized


def html_report(runs: Runs, tables: Sequence[Table], *, title: str = "", folders: str = "") -> str:
    """Returns the page. It loads nothing, and all names and texts of the runs are escaped.

    Args:
        runs: The runs.
        tables: The paper's tables. Those without any run of a model of the paper are left out.
        title: The heading. By default it names the methods, the tasks and the models.
        folders: Where the runs are from, for the line below the heading.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    shown = PageRuns(runs)
    made = [*(make(shown) for make in SECTIONS), *map(_paper_table, tables), all_runs(shown)]
    environment = Environment(
        loader=PackageLoader(__package__, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html").render(
        title=title or page_title(shown),
        subtitle=_subtitle(shown, folders),
        sections=[section for section in made if section is not None],
        legend=[(look(method), method_name(method)) for method in shown.methods],
    )


def page_title(runs: PageRuns) -> str:
    """Returns what the runs compare, such as ``ERM, SAM and δ-SAM on mrpc with bert-small``."""
    if not runs.cells:
        return "No finished run"
    tasks = sorted({run.task for found in runs.cells.values() for run in found})
    models = sorted({model for _, model, _ in runs.cells})
    methods = [method_name(method) for method in runs.methods]
    return f"{_listed(methods, 'method')} on {_listed(tasks, 'task')} with {_listed(models, 'model')}"


def _subtitle(runs: PageRuns, folders: str) -> str:
    finished = runs.runs.finished
    seeds = len({run.seed for run in finished})
    where = f" in {folders}" if folders else ""
    return f"{pluralized(len(finished), 'finished run')}{where}, {pluralized(seeds, 'seed')}. Made by deltasam report."


def _listed(names: Collection[str], noun: str) -> str:
    """Up to four names, or their number."""
    if len(names) > 4:
        return pluralized(len(names), noun)
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _paper_table(table: Table) -> Section | None:
    """A table of the paper, if one of our runs is of a model and a method of it."""
    ours = [row for row in table.rows if any(cell.values for cell in row.cells.values())]
    if not any(cell.values and cell.paper is not None for row in ours for cell in row.cells.values()):
        return None
    title, notes = f"The paper's table: {table.name}", [note for note in table_notes(table) if not is_test(note)]
    return Section(name=table.name, title=title, table=table, lines=notes, template="paper_table.html")
