"""``deltasam search``: adaptive search for settings, by Optuna."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from deltasam.lab.cli._runs import bad_input, wide_console


@dataclass(frozen=True, kw_only=True)
class SearchCommand:
    """Looks for the best settings of a run; every trial is a run folder. Stop it at any time and call it again.

    The file has a preset or sections of a run (common), and the space: for each setting a list of choices, or low,
    high and perhaps log. Several processes share a search by the same --output, or by the same --storage.

    Examples:
      deltasam search rho.yaml
      deltasam search rho.yaml --storage postgresql://host/optuna
    """

    file: Positional[Path]
    """The search file."""

    output: Path | None = None
    """Folder of the run folders and of the study; by default runs/<name of the file>."""

    storage: str | None = None
    """URL of a database, for many machines; by default a file in the folder."""

    def run(self) -> None:
        """Searches and prints the best trials."""
        from rich.table import Table

        from deltasam.lab.cli._progress import bar, quiet
        from deltasam.lab.sweeps import read_search, run_search

        console = wide_console()
        quiet()

        def told(_: Any, trial: Any) -> None:
            settings = " ".join(f"{name}={_rounded(value)}" for name, value in trial.params.items())
            value = "diverged" if trial.value is None else f"{trial.value:.4f}"
            console.print(f"trial {trial.number}: {value}  {settings}", highlight=False)

        with bad_input():
            search = read_search(self.file)
            folder = self.output or Path("runs") / search.name
            with bar(search.name) as step:
                study = run_search(search, folder, storage=self.storage, watch=told, step=step)
        finished = [trial for trial in study.trials if trial.value is not None]
        best = sorted(finished, key=lambda trial: trial.value, reverse=study.direction.name == "MAXIMIZE")[:5]
        table = Table("trial", "value", *search.space, box=None, header_style="bold")
        for trial in best:
            shown = [_rounded(trial.params.get(name, "")) for name in search.space]
            table.add_row(str(trial.number), f"{trial.value:.4f}", *shown)
        console.print(table)


def _rounded(value: Any) -> str:
    """A value as it is read; all its digits are in config.yaml of the trial's run."""
    return f"{value:g}" if isinstance(value, float) else str(value)
