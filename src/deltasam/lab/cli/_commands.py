"""The table of commands. A new command is one line here and one file with its dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Command:
    """Where a command lives: imported only when it is called."""

    target: str  # "module:Class"; the class is a frozen keyword-only dataclass with run() -> int | None
    summary: str

    def load(self) -> Any:
        """The dataclass behind the command."""
        module, name = self.target.split(":")
        return getattr(import_module(module), name)


# In the order of the help text. A name may have two words.
COMMANDS: dict[str, Command] = {
    "quickstart": Command("deltasam.lab.cli.quickstart:Quickstart", "compare four methods offline, in some minutes"),
    "train": Command("deltasam.lab.cli.train:Train", "one run, from a preset, a file or options"),
    "sweep": Command("deltasam.lab.cli.sweep:SweepCommand", "what is missing of many runs, from a sweep file"),
    "search": Command("deltasam.lab.cli.search:SearchCommand", "adaptive search for settings, by Optuna"),
    "evaluate": Command("deltasam.lab.cli.evaluate:Evaluate", "metrics of a run, or of any model, on any split"),
    "table": Command("deltasam.lab.cli.table:TableCommand", "the paper's tables, your runs beside its figures"),
    "report": Command("deltasam.lab.cli.report:ReportCommand", "a folder of runs as one page of HTML"),
    "analyze adversarial-risk": Command(
        "deltasam.lab.cli.analyze:AdversarialRisk", "loss under the worst perturbation of each instance"
    ),
    "analyze sharpness": Command(
        "deltasam.lab.cli.analyze:Sharpness", "rise of the loss under batch and instance moves"
    ),
    "analyze alignment": Command(
        "deltasam.lab.cli.analyze:Alignment", "SAM and delta-SAM beside the per-instance gradient"
    ),
    "analyze weights": Command("deltasam.lab.cli.analyze:Weights", "signal and noise of the instance weights g"),
    "analyze examples": Command(
        "deltasam.lab.cli.examples:Examples", "which examples get the weights g, for the report"
    ),
    "analyze landscape": Command(
        "deltasam.lab.cli.landscape:Landscape", "the loss around the weights, for the report"
    ),
    "list tasks": Command("deltasam.lab.cli.list_tasks:ListTasks", "the tasks, with their metrics"),
    "list presets": Command("deltasam.lab.cli.list_presets:ListPresets", "the paper's setups, and small ones"),
    "list methods": Command(
        "deltasam.lab.cli.list_methods:ListMethods", "the methods, with what a step of each costs"
    ),
    "bench step": Command("deltasam.lab.cli.bench_step:BenchStep", "time and memory of a step of every method"),
    "bench train": Command(
        "deltasam.lab.cli.bench_train:BenchTrain", "wall time of whole trainings, eager and captured"
    ),
    "env": Command("deltasam.lab.cli.env:Env", "versions and devices, to paste into a bug report"),
}
