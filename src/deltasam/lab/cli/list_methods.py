"""``deltasam list methods``: what there is to choose from."""

from __future__ import annotations

import inspect
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ListMethods:
    """The methods with their cost (forward/backward passes of a step), and in one line what they do."""

    def run(self) -> None:
        """Prints one row per method."""
        from rich.console import Console
        from rich.table import Table

        from deltasam.lab.catalogue import METHODS
        from deltasam.lab.plugins import load_plugins

        load_plugins()
        table = Table("method", "passes", "what it does", box=None, pad_edge=False)
        for name, method in METHODS.items():
            own = not method.__module__.startswith("deltasam.")  # a file of the user's may hold several
            summary = inspect.getdoc(method if own else inspect.getmodule(method)) or ""
            if summary.startswith(f"{method.__name__}("):  # dataclass writes the signature where there is no docstring
                summary = ""
            table.add_row(name, method.cost, summary.partition("\n")[0])
        Console().print(table)
