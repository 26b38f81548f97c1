"""What a section is, and the runs that all sections show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from deltasam.lab.report._figures import svg
from deltasam.lab.report._names import method_order, short_models
from deltasam.lab.report._risks import Risks, chosen_risks
from deltasam.lab.report._runs import Run, Runs
from deltasam.lab.report._select import Cells, by_cell
from deltasam.lab.report._table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page. The template decides which parts it shows; :func:`html_report` renders it."""

    name: str  #: Anchor.
    title: str  #: Heading.
    lines: Sequence[str] = ()  #: Sentences.
    figures: Sequence[tuple[str, Figure]] = ()  #: Titles and figures.
    frame: DataFrame | None = None  #: A table that can be sorted.
    note: str = ""  #: A note below the table.
    table: Table | None = None  #: A table of the paper.
    template: str = "section.html"  #: Template.

    def drawn(self) -> list[tuple[str, str]]:
        """Returns titles and SVG of the figures."""
        return [(title, svg(figure, title)) for title, figure in self.figures]

    def frame_html(self) -> str:
        """Returns the table as HTML, with all text escaped."""
        import pandas as pd

        if self.frame is None:
            return ""
        with pd.option_context("display.max_colwidth", None):
            return str(self.frame.to_html(index=False, border=0, classes="sortable"))


@dataclass(frozen=True)
class PageRuns:
    """The runs of a page."""

    runs: Runs

    @cached_property
    def cells(self) -> Cells:
        """The runs of each (task, model, method), with short names of the models."""
        found = by_cell(self.runs.finished)
        short = short_models(model for _, model, _ in found)
        return {(task, short[model], method): runs for (task, model, method), runs in found.items()}

    @cached_property
    def setups(self) -> dict[tuple[str, str], dict[str, list[Run]]]:
        """(task, model) to the runs of each method, sorted."""
        found: dict[tuple[str, str], dict[str, list[Run]]] = {}
        for task, model, method in sorted(self.cells, key=lambda key: (*key[:2], method_order(key[2]))):
            found.setdefault((task, model), {})[method] = self.cells[task, model, method]
        return found

    @cached_property
    def risks(self) -> Risks:
        """The adversarial risks that are comparable."""
        return chosen_risks(self.cells)

    @cached_property
    def logs(self) -> dict[str, list[dict[str, Any]]]:
        """The log of each run, by run id."""
        return {run.run_id: run.log() for found in self.cells.values() for run in found}
