"""What the sections of the page are made of: the runs they read, and the parts they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from deltasam.lab.report._figures import svg
from deltasam.lab.report._learned import learning_problem
from deltasam.lab.report._names import method_order, short_models
from deltasam.lab.report._risks import Risks, chosen_risks
from deltasam.lab.report._runs import Run, Runs
from deltasam.lab.report._select import Cells, Key, best_variant, by_variant
from deltasam.lab.report._strips import Axis
from deltasam.lab.report._table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True)
class View:
    """One of the dot plots of a card."""

    label: str  #: What is drawn.
    axis: Axis  #: Its axis.
    strips: Sequence[str]  #: SVG of each row; empty where there is nothing to draw.


@dataclass(frozen=True, kw_only=True)
class Card:
    """A dot plot with a row for each method, and the numbers beside it."""

    title: str  #: What is compared.
    about: str  #: Metric and common settings.
    head: str  #: Heading of the main number.
    rows: Sequence[Mapping[str, Any]]  #: ``look``, ``method``, ``mean``, ``best`` and the texts of ``columns``.
    columns: Sequence[str] = ()  #: Headings of the other texts.
    views: Sequence[View] = ()  #: Dot plots; the reader switches between them.
    notes: Sequence[str] = ()  #: Sentences below.


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page. The template decides which parts it shows; :func:`html_report` renders it."""

    name: str  #: Anchor.
    title: str  #: Heading.
    intro: str = ""  #: How to read it.
    cards: Sequence[Card] = ()  #: Dot plots.
    figures: Sequence[tuple[str, Figure]] = ()  #: Titles and figures.
    rows: Sequence[dict[str, Any]] = ()  #: Rows of a table that can be sorted.
    lines: Sequence[str] = ()  #: Sentences.
    problems: Sequence[str] = ()  #: What is missing or broken.
    note: str = ""  #: A note below the table.
    table: Table | None = None  #: A table of the paper.
    template: str = "section.html"  #: Template.

    def drawn(self) -> list[tuple[str, str]]:
        """Returns titles and SVG of the figures."""
        return [(title, svg(figure, title)) for title, figure in self.figures]

    @property
    def frame(self) -> DataFrame:
        """The rows as a frame."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def frame_html(self) -> str:
        """Returns the rows as HTML, with all text escaped."""
        import pandas as pd

        with pd.option_context("display.max_colwidth", None):
            return str(self.frame.to_html(index=False, border=0, classes="sortable"))


@dataclass(frozen=True)
class PageRuns:
    """The runs of a page."""

    runs: Runs

    @cached_property
    def variants(self) -> dict[Key, list[list[Run]]]:
        """The runs of each variant of each (task, model, method), with short names of the models."""
        found = by_variant(self.runs.finished)
        short = short_models(model for _, model, _ in found)
        return {(task, short[model], method): runs for (task, model, method), runs in found.items()}

    @cached_property
    def cells(self) -> Cells:
        """The runs of the chosen variant of each (task, model, method)."""
        return {key: best_variant(variants) for key, variants in self.variants.items()}

    @cached_property
    def setups(self) -> dict[tuple[str, str], dict[str, list[Run]]]:
        """(task, model) to the runs of each method, sorted."""
        found: dict[tuple[str, str], dict[str, list[Run]]] = {}
        for task, model, method in sorted(self.cells, key=lambda key: (*key[:2], method_order(key[2]))):
            found.setdefault((task, model), {})[method] = self.cells[task, model, method]
        return found

    @cached_property
    def methods(self) -> list[str]:
        """All methods, sorted."""
        return sorted({method for _, _, method in self.cells}, key=method_order)

    @cached_property
    def risks(self) -> Risks:
        """The adversarial risks that are comparable."""
        return chosen_risks(self.cells)

    @cached_property
    def logs(self) -> dict[str, list[dict[str, Any]]]:
        """The log of each run, by run id."""
        return {run.run_id: run.log() for found in self.cells.values() for run in found}

    @cached_property
    def unlearned(self) -> dict[str, str]:
        """Run id to reason, for the runs of the cells that learned nothing."""
        runs = [run for found in self.cells.values() for run in found]
        found = {run.run_id: learning_problem(run) for run in runs}
        return {run_id: why for run_id, why in found.items() if why}


def setup_title(task: str, model: str) -> str:
    """Returns the heading of a setup."""
    return f"{task}, {model}"


Maker = Callable[[PageRuns], Section | None]
"""Makes a section, or None if the runs have nothing to show."""
