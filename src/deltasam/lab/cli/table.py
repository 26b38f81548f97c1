"""``deltasam table``: the paper's tables from a folder of runs, beside the paper's own figures."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError
from deltasam.lab.cli._runs import wide_console, write_file

if TYPE_CHECKING:
    from deltasam.lab.report import Runs, Table

Which = Literal["glue", "sts", "summarization", "adversarial-risk", "hyperparameters", "running-time"]


@dataclass(frozen=True, kw_only=True)
class TableCommand:
    """One of the paper's tables: our runs, the paper's figures, and the difference of the two.

    The difference is taken with the paper's aggregate (best of 5 on GLUE, of more seeds the first 5; mean on STS),
    whatever ours is shown as.

    Examples:
      deltasam table glue runs
      deltasam table glue runs --aggregate max --format latex --output table1.tex
      deltasam table adversarial-risk runs --measure --rho 0.05
    """

    table: Positional[Which]
    """Which table."""

    folders: Positional[tuple[Path, ...]] = (Path("runs"),)
    """Folders with run folders in them, at any depth."""

    aggregate: Literal["mean", "median", "max"] = "mean"
    """How several seeds become one number."""

    spread: Literal["std", "ci", "none"] = "std"
    """What stands beside a mean: standard deviation, 95% bootstrap interval, or nothing."""

    format: Literal["terminal", "markdown", "latex", "csv"] = "terminal"
    """What is written; CSV has all statistics of every cell."""

    output: Path | None = None
    """A file to write to instead of the terminal."""

    no_paper: bool = False
    """Leave out the paper's figures, the differences, and what has no run; not of CSV, which has everything."""

    measure: bool = False
    """For adversarial-risk: measure the runs that lack it or have it at other settings, if their weights are there."""

    rho: float | None = None
    """For adversarial-risk: the radius; by default that of most runs, 0.05 where none is measured."""

    rows: int | None = None
    """For --measure: a fixed random sample of so many rows; by default that of most runs, 256 where there is none."""

    data: Path | None = None
    """For --measure: folder with the datasets, if it is not where the runs had it."""

    def run(self) -> None:
        """Reads the runs and writes the table."""
        from deltasam.lab.report import TABLES, read_runs, to_csv, to_latex, to_markdown

        for folder in self.folders:
            if not folder.is_dir():
                raise InputError(f"{folder}: no such folder; `deltasam train` and `deltasam sweep` make run folders")
        for option in ("rows", "data"):
            if getattr(self, option) is not None and not self.measure:
                raise InputError(f"--{option} is for --measure; without it nothing is measured")
        if self.rho is not None and self.table != "adversarial-risk":
            raise InputError(f"--rho is for adversarial-risk; {self.table} has no radius")
        runs = read_runs(*self.folders)
        if self.measure:
            self._measure(runs)
        options = {} if self.rho is None else {"rho": self.rho}
        table = TABLES[self.table](runs, aggregate=self.aggregate, **options)
        paper = not self.no_paper
        if self.format == "terminal" and self.output is None:
            self._show(runs, table)
            return
        if self.format == "csv":
            text = to_csv(table)
        elif self.format == "latex":
            text = to_latex(table, spread=self.spread, paper=paper)
        else:
            text = to_markdown(table, spread=self.spread, paper=paper)
        if self.output is None:
            print(text, end="")
        else:
            write_file(self.output, text)
        self._tell_of_others(runs)

    def _show(self, runs: Runs, table: Table) -> None:
        from deltasam.lab.report import table_notes, terminal_parts

        console = wide_console()
        for part in terminal_parts(table, console.width, spread=self.spread, paper=not self.no_paper):
            console.print(part)
        for note in table_notes(table):
            console.print(f"- {note}", highlight=False)
        elsewhere = self._elsewhere(runs, table)
        console.print(elsewhere, highlight=False, markup=False, end="")
        if not elsewhere:
            self._tell_of_others(runs)

    def _tell_of_others(self, runs: Runs) -> None:
        """One line about runs of tasks that the table does not have, beside the output."""
        from deltasam.lab.report import TABLE_TASKS
        from deltasam.step.names import counted

        others = [run.task for run in runs.finished if run.task not in TABLE_TASKS.get(self.table, (run.task,))]
        if others:
            there = f"{counted(len(others), 'finished run')} of other tasks ({', '.join(sorted(set(others)))})"
            where = f"deltasam report {' '.join(map(str, self.folders))}"
            are = "is" if len(others) == 1 else "are"
            print(f"deltasam table {self.table}: {there} {are} not in it; see them by: {where}", file=sys.stderr)

    def _elsewhere(self, runs: Runs, table: Table) -> str:
        """Where to see the runs, if there are some and none is in the table."""
        from deltasam.step.names import counted

        if not runs.finished or any(cell.values for row in table.rows for cell in row.cells.values()):
            return ""
        tasks = ", ".join(sorted({run.task for run in runs.finished}))
        there = f"{counted(len(runs.finished), 'finished run')} ({tasks})"
        folders = " ".join(map(str, self.folders))
        return f"- None of the {there} is of this table; see them by: deltasam report {folders}\n"

    def _measure(self, runs: Runs) -> None:
        """Measures what is missing. A run that cannot be measured is told of, and costs the others nothing."""
        from deltasam.lab.cli._progress import quiet
        from deltasam.lab.cli._runs import check_positive
        from deltasam.lab.cli.analyze import or_refusal
        from deltasam.lab.experiments import ConfigError
        from deltasam.lab.report import usual_risk
        from deltasam.lab.sweeps import RISK, record_risk

        if self.table != "adversarial-risk":
            raise InputError(f"--measure is for adversarial-risk; {self.table} needs no measurement")
        check_positive(rho=self.rho, rows=self.rows)
        quiet()
        data = None if self.data is None else str(self.data.resolve())
        wanted = usual_risk(runs.finished, rho=self.rho, rows=self.rows)
        known = {run.path: run.risk() for run in runs.finished}
        there = [path for path, risk in known.items() if risk is not None and risk["settings"] == wanted]
        refused: list[ConfigError] = []
        for path in known:
            if path in there or not (path / "model").is_dir():
                continue
            if known[path] is None:  # what is cut short or altered
                (path / "analysis" / RISK).unlink(missing_ok=True)
            found = or_refusal(lambda path: record_risk(path, **wanted, data=data), path)
            if isinstance(found, ConfigError):
                refused.append(found)
            else:
                there.append(path)
        if refused and not there:
            raise InputError(str(refused[0]))
        for one in refused:
            print(f"left out: {one}", file=sys.stderr)
