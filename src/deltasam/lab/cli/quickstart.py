"""``deltasam quickstart``: four methods on a real model and real text, offline, in a few minutes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deltasam.lab.cli._arguments import check_positive
from deltasam.lab.cli._errors import one_line_errors
from deltasam.lab.cli._output import progress_bar, results_table, silence_libraries, wide_console

if TYPE_CHECKING:
    from rich.console import Console

VARIANTS = ("", "/sam", "/delta-sam", "/per-instance")


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Fine-tunes an encoder of 22M parameters with four methods: ERM, SAM, delta-SAM and exact per-instance SAM.

    The task is to decide whether a one-line description belongs to a function of Python's standard library. The
    encoder comes from an installed package, so nothing is downloaded. It takes about five minutes on two cores.
    Finished runs are not repeated.
    """

    output: Path = Path("runs/quickstart")
    """Folder for the four run folders."""

    model: str = "minilm-l6"
    """The sentence encoder: minilm-l6, a folder, or a name on the hub."""

    rho: float = 0.05
    """Radius of adversarial risk and sharpness, for all methods."""

    risk_rows: int = 32
    """Number of rows for adversarial risk and sharpness."""

    def run(self) -> None:
        """Trains, measures and prints the table."""
        from deltasam.lab.experiments import resolve, run

        check_positive(rho=self.rho, risk_rows=self.risk_rows)
        console = wide_console()
        silence_libraries()
        console.print("Does this description belong to this function? 320 pairs from Python's standard library;")
        console.print(f"the sentence encoder {self.model}, 20 updates with each method.\n", highlight=False)
        folders, results = [], []
        with one_line_errors():
            for variant in VARIANTS:
                config = resolve(preset=f"quickstart{variant}", options={"model": self.model})
                folders.append(self.output / type(config.method).__name__)
                with progress_bar(f"{type(config.method).__name__:<14}") as watch:
                    results.append(run(config, folders[-1], watch=watch))
            measured = [self._measure(folder) for folder in folders]
        console.print()
        console.print(results_table(results, measured))
        self._next(console, folders)

    def _measure(self, folder: Path) -> dict[str, str]:
        """Returns loss, adversarial risk and sharpness of a run's final weights."""
        from deltasam.analysis import sharpness
        from deltasam.lab.experiments import load_run

        _, loaded = load_run(folder, rows=self.risk_rows)
        found = sharpness(loaded.model, loaded.batches(16), loaded.objective, rho=self.rho)
        loss = loaded.task.evaluate(loaded.model, loaded.tokenizer, loaded.rows)["loss"]
        return {
            "loss": f"{loss:.3f}",
            f"adversarial risk ({self.rho})": f"{loss + found.instance:.3f}",
            f"sharpness ({self.rho})": f"{found.batch:.3f}",
        }

    def _next(self, console: Console, folders: list[Path]) -> None:
        lines = (
            "",
            f"Adversarial risk: the loss under the worst perturbation of norm {self.rho} for each pair.",
            "Sharpness: the rise of the loss under the worst perturbation for each batch. Passes: forward/backward.",
            "These runs are too short to rank the methods.",
            "",
            f"Run folders: {self.output}/{{{','.join(folder.name for folder in folders)}}}",
            "What to try next:",
            f"  deltasam analyze weights {folders[2]}",
            "  deltasam train --preset small/docstrings/delta-sam      # all training pairs",
            "  deltasam train --preset small/mrpc/delta-sam            # GLUE, from the hub or from --data",
            "  deltasam list presets                                   # the paper's setups",
        )
        for line in lines:
            console.print(line, highlight=False)
