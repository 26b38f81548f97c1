"""``deltasam search``: adaptive search for settings with Optuna."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from deltasam.lab.cli._errors import one_line_errors
from deltasam.lab.cli._output import plain_table, progress_bar, silence_libraries, wide_console


@dataclass(frozen=True, kw_only=True)
class SearchCommand:
    """Searches for the best settings of a run with Optuna. It can be stopped and continued at any time.

    Every trial is a run folder. The search file contains a preset or sections of a run (common), and the search space:
    for each setting a list of choices, or low, high and optionally log. Processes with the same --output or --storage
    share one search. Needs Optuna: pip install 'deltasam[search]'. For the radius alone,
    `deltasam search radius` needs neither a file nor Optuna.

    Examples:
      deltasam search rho.yaml
      deltasam search rho.yaml --storage postgresql://host/optuna
    """

    file: Positional[Path]
    """The search file."""

    output: Path | None = None
    """Folder for the run folders and the study. Defaults to runs/<name of the file>."""

    storage: str | None = None
    """URL of a database, for a search on several machines. Defaults to a file in the output folder."""

    def run(self) -> None:
        """Searches and prints the best trials."""
        from deltasam.lab.sweeps import read_search, run_search

        console = wide_console()
        silence_libraries()

        def show(_: Any, trial: Any) -> None:
            settings = " ".join(f"{name}={_rounded(value)}" for name, value in trial.params.items())
            value = "diverged" if trial.value is None else f"{trial.value:.4f}"
            console.print(f"trial {trial.number}: {value}  {settings}", highlight=False)

        with one_line_errors():
            search = read_search(self.file)
            folder = self.output or Path("runs") / search.name
            with progress_bar(search.name) as step:
                study = run_search(search, folder, storage=self.storage, watch=show, step=step)
        finished = [trial for trial in study.trials if trial.value is not None]
        best = sorted(finished, key=lambda trial: trial.value, reverse=study.direction.name == "MAXIMIZE")[:5]
        table = plain_table("trial", "value", *search.space)
        for trial in best:
            shown = [_rounded(trial.params.get(name, "")) for name in search.space]
            table.add_row(str(trial.number), f"{trial.value:.4f}", *shown)
        console.print(table)


def _rounded(value: Any) -> str:
    """Shortens a number for display; config.yaml of the run has all digits."""
    return f"{value:g}" if isinstance(value, float) else str(value)
