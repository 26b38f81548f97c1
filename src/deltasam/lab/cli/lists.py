"""``deltasam list ...``: what can be chosen by name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError
from deltasam.lab.cli._output import plain_table, wide_console


@dataclass(frozen=True, kw_only=True)
class ListTasks:
    """Lists the tasks with their metrics, the primary one first, and the source of their data."""

    def run(self) -> None:
        """Prints one row per task."""
        from deltasam.lab.plugins import load_plugins
        from deltasam.lab.tasks import TASKS

        load_plugins()
        table = plain_table("task", "metrics", "data")
        for name, task in TASKS.items():
            shown = task.metrics if len(task.metrics) < 4 else (task.metrics[0], "...")
            table.add_row(name, ", ".join(shown), task.data_note)
        wide_console().print(table)


@dataclass(frozen=True, kw_only=True)
class ListPresets:
    """Lists the presets and their variants, one per method. Run one with `deltasam train --preset NAME/VARIANT`."""

    under: Positional[str] = ""
    """List only presets whose name starts with this."""

    names: bool = False
    """Print full names only, one per line, including variants."""

    def run(self) -> None:
        """Prints one row per preset, or one line per name."""
        from deltasam.lab.experiments import preset_variants

        presets = {name: found for name, found in preset_variants().items() if name.startswith(self.under)}
        if not presets:
            raise InputError(f"no preset starts with {self.under!r}; `deltasam list presets` lists all of them")
        if self.names:
            for name, found in presets.items():
                print(name, *(f"{name}/{variant}" for variant in found), sep="\n")
            return
        table = plain_table("preset", "variants")
        for name, found in presets.items():
            table.add_row(name, ", ".join(found))
        wide_console().print(table)


@dataclass(frozen=True, kw_only=True)
class ListMethods:
    """Lists the methods with the cost of a step, in forward/backward passes."""

    def run(self) -> None:
        """Prints one row per method, and where to find the regularisers."""
        from deltasam.lab.cli._sources import METHODS, classes_in
        from deltasam.lab.plugins import has_plugins

        if has_plugins():
            _print_costs("method", "what it does", _with_plugins("METHODS"))
        else:
            _print_rows("method", "what it does", classes_in(*METHODS))
        print("\nRegularisers combine with every method: `deltasam list regularisers`.")


@dataclass(frozen=True, kw_only=True)
class ListRegularisers:
    """Lists the regularisers with the cost of a step, in forward/backward passes.

    A regulariser changes the loss and combines with every method. The costs are those of plain training (ERM); with
    another method they multiply.

    Examples:
      deltasam train --preset small/mrpc/delta-sam "regularisers=[{name: RDrop, alpha: 0.5}]"
    """

    def run(self) -> None:
        """Prints one row per regulariser."""
        from deltasam.lab.cli._sources import REGULARISERS, classes_in
        from deltasam.lab.plugins import has_plugins

        if has_plugins():
            _print_costs("regulariser", "what it adds", _with_plugins("REGULARISERS"))
        else:
            _print_rows("regulariser", "what it adds", classes_in(*REGULARISERS))


def _with_plugins(table: str) -> dict[str, Any]:
    """Imports the parts of the package and of the plugins, which takes seconds because it imports torch."""
    from deltasam.lab import catalogue, experiments
    from deltasam.lab.plugins import load_plugins

    load_plugins()
    return dict(catalogue.METHODS if table == "METHODS" else experiments.REGULARISERS)


def _print_costs(title: str, description: str, kinds: dict[str, Any]) -> None:
    rows = {name: (str(getattr(kind, "cost", "")), _summary(kind)) for name, kind in kinds.items()}
    _print_rows(title, description, rows)


def _print_rows(title: str, description: str, rows: dict[str, tuple[str, str]]) -> None:
    table = plain_table(title, "cost", description)
    for name, (cost, summary) in rows.items():
        table.add_row(name, cost, summary)
    wide_console().print(table)


def _summary(kind: type) -> str:
    """Returns the first line of the docstring: our modules hold one class each, a user's module may hold several."""
    ours = kind.__module__.startswith("deltasam.")
    text = inspect.getdoc(inspect.getmodule(kind) if ours else kind) or ""
    is_signature = text.startswith(f"{kind.__name__}(")  # written by dataclass where there is no docstring
    return "" if is_signature else text.partition("\n")[0]
