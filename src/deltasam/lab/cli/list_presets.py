"""``deltasam list presets``: the paper's setups by name."""

from __future__ import annotations

from dataclasses import dataclass

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class ListPresets:
    """The presets with their variants, one per compared method; `deltasam train --preset NAME/VARIANT` runs one."""

    under: Positional[str] = ""
    """Only presets whose name starts with this."""

    names: bool = False
    """Full names only, one per line, variants included."""

    def run(self) -> None:
        """Prints one row per preset, or one line per name."""
        from rich.table import Table

        from deltasam.lab.cli._errors import InputError
        from deltasam.lab.cli._runs import wide_console
        from deltasam.lab.experiments import preset_variants

        presets = {name: found for name, found in preset_variants().items() if name.startswith(self.under)}
        if not presets:
            raise InputError(f"no preset starts with {self.under!r}; `deltasam list presets` has them all")
        if self.names:
            print(
                "\n".join(full for name, found in presets.items() for full in (name, *(f"{name}/{v}" for v in found)))
            )
            return
        table = Table("preset", "variants", box=None, pad_edge=False, header_style="bold")
        for name, found in presets.items():
            table.add_row(name, ", ".join(found))
        wide_console().print(table)
