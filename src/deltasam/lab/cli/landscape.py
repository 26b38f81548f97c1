"""``deltasam analyze landscape``: slices of the loss around the final weights, stored for the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltasam.lab.cli._arguments import check_positive
from deltasam.lab.cli._errors import InputError
from deltasam.lab.cli._output import progress_bar, silence_libraries, wide_console
from deltasam.lab.cli._run_folders import OnRuns, each_run


@dataclass(frozen=True, kw_only=True)
class Landscape(OnRuns):
    """Computes the loss along a random direction, SAM's direction and each instance's direction, and over a plane.

    Random directions are filter-normalised: at distance 1 the perturbation is as large as the weights. The plane is
    spanned by two random directions. Results are stored in the run folder for `deltasam report`; a second call with
    the same settings reuses them.

    Examples:
      deltasam analyze landscape runs/mrpc-*
    """

    points: int = 11
    """Number of points per direction."""

    reach: float = 0.5
    """Largest distance along random directions, to both sides."""

    rho: float = 0.1
    """Largest distance along SAM's and the instances' directions."""

    plane: int = 9
    """Number of points per side of the plane; 0 for no plane."""

    rows: int = 64
    """Size of the fixed random sample of rows."""

    seed: int = 0
    """Seed of the random directions, which all runs share."""

    split: str | None = None
    """The split. Defaults to the one that the run was evaluated on."""

    def run(self) -> None:
        """Measures every run and prints the range of the loss along each direction."""
        check_positive(reach=self.reach, rho=self.rho, rows=self.rows, batch_size=self.batch_size)
        if self.points < 3 or self.plane < 0:
            raise InputError(f"--points {self.points} must be at least 3, --plane {self.plane} at least 0")
        runs = self.runs()
        silence_libraries()
        console = wide_console()
        for folder, found in each_run(runs, self.measured):
            ranges = ", ".join(
                f"{name}: {min(line['loss']):.4g} to {max(line['loss']):.4g}" for name, line in found["lines"].items()
            )
            console.print(f"{folder.name}: {ranges}", highlight=False)
        for text in self._legend():
            console.print(text, highlight=False)

    def _legend(self) -> tuple[str, ...]:
        reach, rho = f"{self.reach:g}", f"{self.rho:g}"
        plane = f", with a plane of {self.plane} x {self.plane} points" if self.plane else ""
        return (
            "",
            "Lowest and highest mean loss per instance, in the unit of the objective (cross-entropy: nats), along",
            f"- a random direction: from -{reach} to {reach} times the norm of the weights, filter by filter;",
            f"- SAM's direction, the gradient of all rows: Euclidean distances from -{rho} to {rho};",
            f"- each instance's direction, its own gradient: Euclidean distances from 0 to {rho}.",
            f"Stored in analysis/ of each run folder{plane}, for `deltasam report`.",
        )

    def measured(self, folder: Path) -> dict[str, Any]:
        """Returns the slices of one run, from its folder if they are stored there with the same settings."""
        from deltasam.integrations.storage import explain_storage_errors, write_text
        from deltasam.lab.report import LANDSCAPE, read_measurement

        settings = {
            "points": self.points, "reach": self.reach, "rho": self.rho, "plane": self.plane, "rows": self.rows,
            "seed": self.seed, "split": self.split,
        }  # fmt: skip
        path = folder / "analysis" / LANDSCAPE
        known = read_measurement(path)
        if known is not None and known.get("settings") == settings:
            return known
        if known is None and path.is_file():
            print(f"{path}: incomplete or changed; measuring again", file=sys.stderr)
        found = {"settings": settings, **self._measure(folder)}
        with explain_storage_errors(path.parent):
            path.parent.mkdir(exist_ok=True)
            write_text(path, json.dumps(found))
        return found

    def _measure(self, folder: Path) -> dict[str, Any]:
        from deltasam.analysis import filter_direction, gradient_direction, instance_slice, line_slice, plane_slice
        from deltasam.lab.experiments import load_run

        _, loaded = load_run(folder, split=self.split, rows=self.rows, data=self.data_folder)
        model, batches, objective = loaded.model, loaded.batches(self.batch_size), loaded.objective
        wide, near = _between(-self.reach, self.reach, self.points), _between(-self.rho, self.rho, self.points)
        ahead = _between(0.0, self.rho, self.points)
        one, other = (filter_direction(model, seed=self.seed + k) for k in (0, 1))
        sam = gradient_direction(model, batches, objective)
        side = _between(-self.reach, self.reach, self.plane) if self.plane else []
        separable = objective.separable  # in contrastive training the loss of an instance depends on the others
        total, done = (3 if separable else 2) * self.points + len(side), 0

        with progress_bar("landscape") as watch:

            def shown(points: list[float]) -> Iterator[list[float]]:
                """Yields one point after the other, and moves the bar when it is measured."""
                nonlocal done
                for point in points:
                    yield [point]
                    done += 1
                    watch(done, total, {})

            along = (model, batches, objective)
            lines = {
                name: {"x": x, "loss": [line_slice(*along, d, t, progress=False)[0] for t in shown(x)]}
                for name, d, x in (("a random direction", one, wide), ("SAM's direction", sam, near))
            }
            if separable:
                own = [instance_slice(*along, t, progress=False)[0] for t in shown(ahead)]
                lines["each instance's direction"] = {"x": ahead, "loss": own}
            loss = [plane_slice(*along, one, other, side, rows=t, progress=False)[0] for t in shown(side)]
        planes = {"two random directions": {"x": side, "y": side, "loss": loss}} if side else {}
        return {"lines": lines, "planes": planes}


def _between(low: float, high: float, count: int) -> list[float]:
    return [round(low + (high - low) * k / (count - 1), 12) for k in range(count)] if count > 1 else [0.0]
