"""The table of commands. A new command needs one line here and a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Command:
    """Where a command is defined. It is imported only when it is called."""

    target: str  # "module:Class" in this package; a frozen keyword-only dataclass with run() -> int | None
    summary: str

    def load(self) -> Any:
        """Returns the dataclass of the command."""
        module, name = self.target.split(":")
        return getattr(import_module(f"{__package__}.{module}"), name)


# In the order of the help text. A name may have two words.
COMMANDS: dict[str, Command] = {
    "quickstart": Command("quickstart:Quickstart", "compare methods offline in a few minutes"),
    "train": Command("train:Train", "train and evaluate one run"),
    "compare": Command("compare:Compare", "compare methods on your own files: table and report"),
    "sweep": Command("sweep:SweepCommand", "train all missing runs of a sweep file"),
    "search": Command("search:SearchCommand", "search for the best settings with Optuna"),
    "search radius": Command("search_radius:SearchRadius", "train with several radii, choose one"),
    "evaluate": Command("evaluate:Evaluate", "compute the metrics of a run or a model"),
    "table": Command("table:TableCommand", "a table of your runs, or one of the paper's"),
    "check": Command("check:Check", "check the results of runs before you share them"),
    "report": Command("report:ReportCommand", "write an HTML page about a folder of runs"),
    "analyze adversarial-risk": Command("analyze:AdversarialRisk", "loss under each instance's worst perturbation"),
    "analyze sharpness": Command("analyze:Sharpness", "rise of the loss under worst-case perturbations"),
    "analyze alignment": Command("analyze:Alignment", "cosine with the exact per-instance gradient"),
    "analyze weights": Command("analyze:Weights", "signal-to-noise ratio of the instance weights"),
    "analyze examples": Command("examples:Examples", "examples with the highest and lowest weights"),
    "analyze landscape": Command("landscape:Landscape", "slices of the loss around the final weights"),
    "list tasks": Command("lists:ListTasks", "tasks and their metrics"),
    "list presets": Command("lists:ListPresets", "setups of the paper, and small ones"),
    "list methods": Command("lists:ListMethods", "methods and their cost per step"),
    "list regularisers": Command("lists:ListRegularisers", "regularisers and their cost per step"),
    "bench step": Command("bench:BenchStep", "time and memory of one training step"),
    "bench train": Command("bench:BenchTrain", "wall time of whole trainings"),
    "env": Command("env:Env", "versions and devices, for bug reports"),
}
