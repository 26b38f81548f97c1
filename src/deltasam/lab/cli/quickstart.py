"""``deltasam quickstart``: four methods side by side on a real model and real text, offline, in minutes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deltasam.lab.cli._runs import bad_input, check_positive, results_table, wide_console

if TYPE_CHECKING:
    from rich.console import Console

VARIANTS = ("", "/sam", "/delta-sam", "/per-instance")


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Fine-tunes a 22M encoder with ERM, SAM, delta-SAM and exact per-instance SAM and compares them in one table.

    The task: does this one-line description belong to this function? Its pairs come from Python's standard library,
    the encoder from an installed package: nothing is downloaded. About five minutes on two cores; what is finished is
    not repeated.
    """

    output: Path = Path("runs/quickstart")
    """Folder of the four run folders."""

    model: str = "minilm-l6"
    """Another sentence encoder: a folder, or a name on the hub."""

    rho: float = 0.05
    """Radius of the adversarial risk and the sharpness, the same for all methods."""

    risk_rows: int = 32
    """Rows that adversarial risk and sharpness are measured on."""

    def run(self) -> None:
        """Trains, measures and prints the table."""
        from deltasam.lab.cli._progress import bar, quiet
        from deltasam.lab.experiments import resolve, run

        check_positive(rho=self.rho, risk_rows=self.risk_rows)
        console = wide_console()
        quiet()
        console.print("Does this description belong to this function? 320 pairs from Python's standard library;")
        console.print(f"the sentence encoder {self.model}, 20 updates with each method.\n", highlight=False)
        folders, results = [], []
        with bad_input():
            for variant in VARIANTS:
                config = resolve(preset=f"quickstart{variant}", options={"model": self.model})
                folders.append(self.output / type(config.method).__name__)
                with bar(f"{type(config.method).__name__:<14}") as watch:
                    results.append(run(config, folders[-1], watch=watch))
            measured = [self._measure(folder) for folder in folders]
        console.print()
        console.print(results_table(results, measured))
        self._next(console, folders)

    def _measure(self, folder: Path) -> dict[str, str]:
        """Adversarial risk and sharpness of a run's final weights."""
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
            f"Adversarial risk: the loss with each pair's own worst weights within {self.rho}. Sharpness: the rise of",
            "the loss at the worst weights that a batch shares. Passes: forward/backward. To rank them, train longer.",
            "",
            f"Run folders: {self.output}/{{{','.join(folder.name for folder in folders)}}}",
            "What to try next:",
            f"  deltasam analyze weights {folders[2]}",
            "  deltasam train --preset small/docstrings/delta-sam      # the whole training set",
            "  deltasam train --preset small/mrpc/delta-sam            # GLUE, from the hub or from --data",
            "  deltasam list presets                                   # the paper's setups",
        )
        for line in lines:
            console.print(line, highlight=False)
