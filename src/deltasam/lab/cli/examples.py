"""``deltasam analyze examples``: which instances get the weights g, kept for the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from deltasam.lab.cli._runs import check_positive, wide_console
from deltasam.lab.cli.analyze import each_run, runs_in


@dataclass(frozen=True, kw_only=True)
class Examples:
    """The weights that a run's method gives to the instances at its final weights, and who gets most and least.

    The weights and the texts of those instances stay in the run folder; `deltasam report` shows them.
    """

    folders: Positional[tuple[Path, ...]]
    """Run folders of delta-SAM, or folders with run folders in them; runs of other methods are left out."""

    rows: int = 256
    """A fixed random sample of so many rows."""

    batch_size: int = 16
    """Instances per batch."""

    most: int = 10
    """So many of the heaviest and of the lightest are kept."""

    data: Path | None = None
    """Folder with the datasets, if it is not where the run had it."""

    def run(self) -> None:
        """Measures every run and prints the heaviest instances."""
        from deltasam.lab.cli._progress import quiet
        from deltasam.lab.sweeps import record_weights

        check_positive(rows=self.rows, batch_size=self.batch_size, most=self.most)
        runs = runs_in(self.folders)
        quiet()
        console = wide_console()
        data = None if self.data is None else str(self.data.resolve())

        def measure(folder: Path) -> dict[str, Any]:
            return record_weights(folder, rows=self.rows, batch_size=self.batch_size, most=self.most, data=data)

        for _, found in each_run(runs, measure):
            for example in found["examples"][: self.most]:
                console.print(f"{example['weight']:.4g}  {example['text']}", highlight=False)
