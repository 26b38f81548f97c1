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
    "train": Command("deltasam.cli.train:Train", "train and evaluate one run, from a preset, a file or options"),
    "list methods": Command("deltasam.cli.list_methods:ListMethods", "the methods, with what a step of each costs"),
    "bench step": Command("deltasam.cli.bench_step:BenchStep", "time and memory of a step of every method"),
    "env": Command("deltasam.cli.env:Env", "versions and devices, to paste into a bug report"),
}
