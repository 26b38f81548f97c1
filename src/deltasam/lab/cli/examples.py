"""``deltasam analyze examples``: instances with the highest and lowest weights, stored for the report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from deltasam.lab.cli._arguments import check_positive
from deltasam.lab.cli._output import silence_libraries, wide_console
from deltasam.lab.cli._run_folders import OnRuns, each_run


@dataclass(frozen=True, kw_only=True)
class Examples(OnRuns):
    """Computes the weight that delta-SAM gives to each instance at the final weights of a run.

    The weights, and the texts with the highest and lowest ones, are stored in the run folder for `deltasam report`.
    """

    folders: Positional[tuple[Path, ...]]
    """Run folders of delta-SAM, or folders that contain some. Runs of other methods are skipped."""

    most: int = 10
    """Number of texts to store with the highest weights, and with the lowest."""

    split: str | None = None
    """The split. Defaults to the one that the runs evaluate on; `train` has the wrong labels of task.label_noise."""

    def run(self) -> None:
        """Measures every run and prints the instances with the highest weights."""
        from deltasam.lab.sweeps import record_weights

        check_positive(rows=self.rows, batch_size=self.batch_size, most=self.most)
        runs = self.runs()
        silence_libraries()
        console = wide_console()
        options: dict[str, Any] = {
            "rows": self.rows,
            "batch_size": self.batch_size,
            "most": self.most,
            "split": self.split,
        }
        measure = partial(record_weights, **options, data=self.data_folder)
        for _, found in each_run(runs, measure):
            for example in found["examples"][: self.most]:
                console.print(f"{example['weight']:.4g}  {example['text']}", highlight=False)
            if "wrong_labels" in found:
                wrong = found["wrong_labels"]
                console.print(
                    f"{wrong['count']} rows with a wrong label: mean weight {wrong['weight']:.3f}; the others: "
                    f"{wrong['others']:.3f} (1 is the mean of a batch)",
                    highlight=False,
                )
        for text in (
            "",
            "Weight of the instance in the perturbation of its batch, relative to the others (no unit), and its text;",
            "highest first. Stored in analysis/ of each run folder, with the lowest; `deltasam report` shows them.",
        ):
            console.print(text, highlight=False)
