"""``deltasam report``: an HTML page about a folder of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from deltasam.lab.cli._errors import InputError
from deltasam.lab.cli._output import write_file
from deltasam.lab.cli._run_folders import check_folders


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Writes one self-contained HTML page: results, tests, cost, calibration, rounding, curves, sharpness.

    The first figure is the result: mean and interval of each method, and its difference to plain training. The page
    needs no network and can be printed or sent by mail.

    Examples:
      deltasam report runs -o report.html
    """

    folders: Positional[tuple[Path, ...]] = (Path("runs"),)
    """Folders that contain run folders at any depth."""

    output: Annotated[Path, arg(aliases=["-o"])] = Path("report.html")
    """The file to write."""

    title: str | None = None
    """Title of the page. By default it names the methods, the tasks and the models."""

    def run(self) -> None:
        """Reads the runs and writes the page."""
        from deltasam.lab.report import TABLES, html_report, read_runs
        from deltasam.step.names import pluralized

        check_folders(self.folders)
        runs = read_runs(*self.folders)
        if not runs.finished:
            problems = "; ".join(["no finished run found", *runs.problems()])
            raise InputError(f"{', '.join(map(str, self.folders))}: {problems}")
        folders = ", ".join(folder.resolve().name for folder in self.folders)
        page = html_report(runs, [make(runs) for make in TABLES.values()], title=self.title or "", folders=folders)
        write_file(self.output, page)
        size = f"{len(page) / 1e6:.1f} MB" if len(page) > 1e6 else f"{len(page) / 1e3:.0f} kB"
        print(f"{pluralized(len(runs.finished), 'run')}, {size}: {self.output}")
        for problem in runs.problems():  # they are on the page, too
            print(f"- {problem}")
