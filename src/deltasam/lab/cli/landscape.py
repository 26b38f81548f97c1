"""``deltasam analyze landscape``: slices of the loss around the final weights of runs, kept for the report."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError
from deltasam.lab.cli._runs import check_positive, wide_console
from deltasam.lab.cli.analyze import each_run, runs_in


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """The loss along a random direction, along SAM's, along every instance's own, and over a plane of two random ones.

    Random directions are filter-normalised: 1 is as far as the weights are large. What was measured with the same
    settings is not measured again; `deltasam report` shows it.

    Examples:
      deltasam analyze landscape runs/mrpc-*
    """

    folders: Positional[tuple[Path, ...]]
    """Run folders, or folders with run folders in them, at any depth."""

    points: int = 11
    """Distances per direction."""

    reach: float = 0.5
    """How far the random directions go, to both sides."""

    rho: float = 0.1
    """How far SAM's and the instances' directions go."""

    plane: int = 9
    """Distances per side of the plane; 0 for no plane."""

    rows: int = 64
    """A fixed random sample of so many rows."""

    batch_size: int = 16
    """Instances per batch."""

    seed: int = 0
    """Seed of the random directions, the same for all runs."""

    split: str | None = None
    """The split; by default the one the run evaluates on."""

    data: Path | None = None
    """Folder with the datasets, if it is not where the run had it."""

    def run(self) -> None:
        """Measures every run and says what it found."""
        from deltasam.lab.cli._progress import quiet

        check_positive(reach=self.reach, rho=self.rho, rows=self.rows, batch_size=self.batch_size)
        if self.points < 3 or self.plane < 0:
            raise InputError(f"--points {self.points} must be at least 3, --plane {self.plane} at least 0")
        runs = runs_in(self.folders)
        quiet()
        console = wide_console()
        for folder, found in each_run(runs, self.measured):
            told = ", ".join(
                f"{name}: {min(line['loss']):.4g} to {max(line['loss']):.4g}" for name, line in found["lines"].items()
            )
            console.print(f"{folder.name}: {told}", highlight=False)

    def measured(self, folder: Path) -> dict[str, Any]:
        """The slices of one run, from its folder if they are there and whole."""
        from deltasam.integrations.storage import explain_storage_errors, write_text
        from deltasam.lab.report import LANDSCAPE, read_landscape

        settings = {
            "points": self.points, "reach": self.reach, "rho": self.rho, "plane": self.plane, "rows": self.rows,
            "seed": self.seed, "split": self.split,
        }  # fmt: skip
        path = folder / "analysis" / LANDSCAPE
        known = read_landscape(path)
        if known is not None and known.get("settings") == settings:
            return known
        if known is None and path.is_file():
            print(f"{path}: it is cut short or altered; measured anew", file=sys.stderr)
        found = {"settings": settings, **self._measure(folder)}
        with explain_storage_errors(path.parent):
            path.parent.mkdir(exist_ok=True)
            write_text(path, json.dumps(found))
        return found

    def _measure(self, folder: Path) -> dict[str, Any]:
        from deltasam.analysis import filter_direction, gradient_direction, instance_slice, line_slice, plane_slice
        from deltasam.lab.experiments import load_run

        data = None if self.data is None else str(self.data)
        _, loaded = load_run(folder, split=self.split, rows=self.rows, data=data)
        model, batches, objective = loaded.model, loaded.batches(self.batch_size), loaded.objective
        wide, near = _between(-self.reach, self.reach, self.points), _between(-self.rho, self.rho, self.points)
        ahead = _between(0.0, self.rho, self.points)
        one, other = (filter_direction(model, seed=self.seed + k) for k in (0, 1))
        sam = gradient_direction(model, batches, objective)
        lines = {
            "a random direction": {"x": wide, "loss": line_slice(model, batches, objective, one, wide)},
            "SAM's direction": {"x": near, "loss": line_slice(model, batches, objective, sam, near)},
        }
        if objective.separable:  # else no instance has a direction of its own, as in contrastive training
            own = instance_slice(model, batches, objective, ahead, progress=False)
            lines["each instance's direction"] = {"x": ahead, "loss": own}
        planes = {}
        if self.plane:
            side = _between(-self.reach, self.reach, self.plane)
            loss = plane_slice(model, batches, objective, one, other, side)
            planes["two random directions"] = {"x": side, "y": side, "loss": loss}
        return {"lines": lines, "planes": planes}


def _between(low: float, high: float, count: int) -> list[float]:
    return [round(low + (high - low) * k / (count - 1), 12) for k in range(count)] if count > 1 else [0.0]
