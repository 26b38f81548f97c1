"""``deltasam table``: your runs in the form of the paper's tables, next to the paper's numbers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from deltasam.lab.cli._arguments import check_positive
from deltasam.lab.cli._errors import InputError
from deltasam.lab.cli._output import silence_libraries, wide_console, write_file
from deltasam.lab.cli._run_folders import check_folders, each_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltasam.lab.report import Results, Runs, Table

Which = Literal["results", "glue", "sts", "summarization", "adversarial-risk", "hyperparameters", "running-time"]


def show_results(tables: Sequence[Results], problems: Sequence[str] = ()) -> None:
    """Prints tables of results with their notes."""
    from deltasam.lab.report import results_to_terminal

    console = wide_console()
    for table in tables:
        console.print(results_to_terminal(table))
        for note in table.notes:
            console.print(f"- {note}", highlight=False)
    for problem in problems:
        console.print(f"- {problem}", highlight=False)


@dataclass(frozen=True, kw_only=True)
class TableCommand:
    """Prints a table of your runs: any runs (`results`), or one of the paper's tables next to the paper's numbers.

    `results` has one table for each task and model, also for your own data: methods, settings, seeds, means with
    intervals, and p against plain training. The others compare with the paper. The difference uses the paper's
    aggregate, whatever `--aggregate` is: on GLUE the best of the first 5 seeds, on STS the mean.

    Examples:
      deltasam table results runs/compare --methods sam per-instance erm --metrics accuracy f1
      deltasam table glue runs
      deltasam table glue runs --aggregate max --format latex --output table1.tex
      deltasam table adversarial-risk runs --measure --rho 0.05
    """

    table: Positional[Which]
    """The table to print."""

    folders: Positional[tuple[Path, ...]] = (Path("runs"),)
    """Folders that contain run folders at any depth."""

    methods: tuple[str, ...] = ()
    """For results: the methods to show, such as erm sam per-instance. Defaults to all."""

    metrics: tuple[str, ...] = ()
    """For results: the metrics to show. Defaults to those of the task."""

    aggregate: Literal["mean", "median", "max"] = "mean"
    """For the paper's tables: how to combine several seeds."""

    spread: Literal["std", "ci", "none"] = "std"
    """For the paper's tables: standard deviation, 95% bootstrap interval, or nothing next to a mean."""

    format: Literal["terminal", "markdown", "latex", "csv"] = "terminal"
    """Output format. CSV contains all statistics of every cell; its notes are printed to stderr."""

    output: Path | None = None
    """File to write to instead of the terminal."""

    no_paper: bool = False
    """For the paper's tables: omit its numbers, the differences, and rows without a run. CSV always contains them."""

    measure: bool = False
    """For adversarial-risk: measure runs that lack it or have it for other settings, if they kept their weights."""

    rho: float | None = None
    """For adversarial-risk: the radius. Defaults to that of most runs, or 0.05."""

    rows: int | None = None
    """For --measure: size of the fixed random sample of rows. Defaults to that of most runs, or 256."""

    data: Path | None = None
    """For --measure: folder with the datasets. Defaults to the one that the run used."""

    def run(self) -> None:
        """Reads the runs and writes the table."""
        from deltasam.lab.report import TABLES, read_runs, to_csv, to_latex, to_markdown

        check_folders(self.folders)
        for option in ("rows", "data"):
            if getattr(self, option) is not None and not self.measure:
                raise InputError(f"--{option} needs --measure")
        if self.rho is not None and self.table != "adversarial-risk":
            raise InputError(f"--rho is for the table adversarial-risk, not for {self.table}")
        runs = read_runs(*self.folders)
        if self.table == "results":
            self._results(runs)
            return
        for option in ("methods", "metrics"):
            if getattr(self, option):
                raise InputError(f"--{option} is for the table results, not for {self.table}")
        if self.measure:
            self._measure(runs)
        options = {} if self.rho is None else {"rho": self.rho}
        table = TABLES[self.table](runs, aggregate=self.aggregate, **options)
        paper = not self.no_paper
        if self.format == "csv":
            text = to_csv(table)
        elif self.format == "latex":
            text = to_latex(table, spread=self.spread, paper=paper)
        else:
            text = to_markdown(table, spread=self.spread, paper=paper)
        if self.output is not None:
            write_file(self.output, text)
        elif self.format == "terminal":
            self._show(table)
        else:
            print(text, end="")
        self._note_runs_not_shown(runs, table)

    def _results(self, runs: Runs) -> None:
        from deltasam.lab.report import result_tables, results_to_csv, results_to_latex, results_to_markdown

        if self.measure:
            raise InputError("--measure is for the table adversarial-risk, not for results")
        for option in ("aggregate", "spread", "no_paper"):
            if getattr(self, option) != getattr(type(self), option):
                raise InputError(f"--{option.replace('_', '-')} is for the paper's tables, not for results")
        if not runs.finished:
            problems = "; ".join(["no finished run found", *runs.problems()])
            raise InputError(f"{', '.join(map(str, self.folders))}: {problems}")
        try:
            tables = result_tables(runs, methods=self.methods, metrics=self.metrics)
        except ValueError as error:
            raise InputError(f"--{error}") from error
        if self.format == "terminal" and self.output is None:
            show_results(tables, [*runs.problems()])
            return
        writers = {"csv": results_to_csv, "latex": results_to_latex}
        text = writers.get(self.format, results_to_markdown)(tables)
        if self.output is not None:
            write_file(self.output, text)
        else:
            print(text, end="")
        notes = [note for table in tables for note in table.notes] if self.format == "csv" else []
        for note in [*notes, *runs.problems()]:
            print(f"deltasam table results: {note}", file=sys.stderr)

    def _show(self, table: Table) -> None:
        from deltasam.lab.report import table_notes, terminal_parts

        console = wide_console()
        for part in terminal_parts(table, console.width, spread=self.spread, paper=not self.no_paper):
            console.print(part)
        for note in table_notes(table):
            console.print(f"- {note}", highlight=False)

    def _note_runs_not_shown(self, runs: Runs, table: Table) -> None:
        """Prints a line to stderr if there are finished runs that are not in the table."""
        from deltasam.lab.report import TABLE_TASKS
        from deltasam.step.names import pluralized

        is_empty = not any(cell.values for row in table.rows for cell in row.cells.values())
        tasks = () if is_empty else TABLE_TASKS.get(self.table)
        others = [run.task for run in runs.finished if tasks is not None and run.task not in tasks]
        if others:
            runs_of = f"{pluralized(len(others), 'finished run')} ({', '.join(sorted(set(others)))})"
            where = f"deltasam report {' '.join(map(str, self.folders))}"
            print(f"deltasam table {self.table}: not shown: {runs_of}; see them with: {where}", file=sys.stderr)

    def _measure(self, runs: Runs) -> None:
        """Measures the adversarial risk where it is missing. Skips runs that cannot be measured, with a message."""
        from deltasam.lab.report import usual_risk
        from deltasam.lab.sweeps import RISK, record_risk

        if self.table != "adversarial-risk":
            raise InputError(f"--measure is for the table adversarial-risk, not for {self.table}")
        check_positive(rho=self.rho, rows=self.rows)
        silence_libraries()
        data = None if self.data is None else str(self.data.resolve())
        wanted = usual_risk(runs.finished, rho=self.rho, rows=self.rows)
        known = {run.path: run.risk() for run in runs.finished}
        measured = [path for path, risk in known.items() if risk is not None and risk["settings"] == wanted]
        missing = [path for path in known if path not in measured and (path / "model").is_dir()]

        def measure(path: Path) -> None:
            if known[path] is None:  # incomplete or changed
                (path / "analysis" / RISK).unlink(missing_ok=True)
            record_risk(path, **wanted, data=data)

        for _ in each_run(missing, measure, others=bool(measured)):
            pass
