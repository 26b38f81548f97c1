"""``deltasam report``: a folder of runs as one page of HTML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from deltasam.lab.cli._errors import InputError
from deltasam.lab.cli._runs import write_file


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """One self-contained page: summary in words, tables that sort, learning curves, adversarial risk, sharpness, cost.

    It needs no network, reads well on a phone and in print, and can be sent as it is.

    Examples:
      deltasam report runs -o report.html
    """

    folders: Positional[tuple[Path, ...]] = (Path("runs"),)
    """Folders with run folders in them, at any depth."""

    output: Annotated[Path, arg(aliases=["-o"])] = Path("report.html")
    """The page."""

    title: str | None = None
    """Its heading; by default the names of the folders."""

    def run(self) -> None:
        """Reads the runs and writes the page."""
        from deltasam.lab.report import TABLES, html_report, read_runs
        from deltasam.step.names import counted

        for folder in self.folders:
            if not folder.is_dir():
                raise InputError(f"{folder}: no such folder; `deltasam train` and `deltasam sweep` make run folders")
        runs = read_runs(*self.folders)
        if not runs.finished:
            told = "; ".join(["there is no finished run in it", *runs.problems()])
            raise InputError(f"{', '.join(map(str, self.folders))}: {told}")
        title = self.title or f"Runs in {', '.join(folder.resolve().name for folder in self.folders)}"
        page = html_report(runs, [make(runs) for make in TABLES.values()], title=title)
        write_file(self.output, page)
        size = f"{len(page) / 1e6:.1f} MB" if len(page) > 1e6 else f"{len(page) / 1e3:.0f} kB"
        print(f"{counted(len(runs.finished), 'run')}, {size}: {self.output}")
        for problem in runs.problems():  # the page tells of them, too
            print(f"- {problem}")
