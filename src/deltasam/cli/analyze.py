"""``deltasam analyze ...``: measurements on the final weights of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from deltasam.cli._errors import InputError
from deltasam.cli._runs import bad_input, wide_console


@dataclass(frozen=True, kw_only=True)
class _Analysis:
    """What all analyses are told."""

    folders: Positional[tuple[Path, ...]]
    """Run folders; several are compared."""

    rho: float = 0.05
    """Radius of the perturbations."""

    split: str | None = None
    """The split; by default the one the run evaluates on."""

    rows: int = 256
    """A fixed random sample of so many rows."""

    batch_size: int = 16
    """Instances per batch."""

    data: Path | None = None
    """Folder with the datasets, if it is not where the run had it."""

    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        """Measures every run and prints one table."""
        from deltasam.cli._progress import quiet
        from deltasam.experiments import load_run

        if not self.folders:
            raise InputError("name at least one run folder")
        quiet()
        lines: list[dict[str, Any]] = []
        for folder in self.folders:
            with bad_input():
                data = None if self.data is None else str(self.data)
                config, loaded = load_run(folder, split=self.split, rows=self.rows, data=data)
            try:
                found = self.measure(loaded.model, loaded.batches(self.batch_size), loaded.objective)
            except ValueError as error:
                raise InputError(f"{folder}: {error}") from error
            name = {"run": config.run_name} if len(self.folders) > 1 else {}
            lines += [{**name, **line} for line in found]
        self._print(lines)

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """The rows of the table for one model."""
        raise NotImplementedError

    def _print(self, lines: list[dict[str, Any]]) -> None:
        if self.json:
            print(json.dumps(lines, indent=2))
            return
        from rich.table import Table

        table = Table(*lines[0], box=None, pad_edge=False, header_style="bold")
        for line in lines:
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in line.values()))
        wide_console().print(table)


@dataclass(frozen=True, kw_only=True)
class AdversarialRisk(_Analysis):
    """The loss under the worst perturbation of each instance (the paper's Table 4), beside the plain loss."""

    steps: int = 1
    """Ascent steps inside the ball; 1 is the paper's choice."""

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """Adversarial risk and loss."""
        from deltasam.analysis import adversarial_risk

        risk = adversarial_risk(model, batches, objective, rho=self.rho, steps=self.steps)
        return [{"adversarial risk": risk.value, "loss": risk.clean, "rho": self.rho, "rows": len(risk.losses)}]


@dataclass(frozen=True, kw_only=True)
class Sharpness(_Analysis):
    """By how much the worst shared perturbation of a batch, and the worst one of each instance, raise the loss."""

    steps: int = 1
    """Ascent steps inside the ball."""

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """R_batch, R_inst and R_inst to first order."""
        from deltasam.analysis import sharpness

        found = sharpness(model, batches, objective, rho=self.rho, steps=self.steps)
        return [{"R_batch": found.batch, "R_inst": found.instance, "first order": found.first_order, "rho": self.rho}]


@dataclass(frozen=True, kw_only=True)
class Alignment(_Analysis):
    """Cosine of each method's gradient with that of exact per-instance SAM, at the final weights."""

    rows: int = 64
    """A fixed random sample of so many rows."""

    eta: float = 1e-4
    """Floor of the denominator of delta-SAM's weights."""

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """One row per method and weighting."""
        from deltasam.analysis import alignment

        return [dataclasses.asdict(row) for row in alignment(model, batches, objective, rho=self.rho, eta=self.eta)]


@dataclass(frozen=True, kw_only=True)
class Weights(_Analysis):
    """Whether delta-SAM's weights g measure the instances or the rounding and the dropout masks, per estimator."""

    rows: int = 64
    """A fixed random sample of so many rows."""

    eta: float = 1e-4
    """Floor of the denominator of delta-SAM's weights."""

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """One row per weighting and condition."""
        from deltasam.analysis import weights_quality

        found = weights_quality(model, batches, objective, rho=self.rho, eta=self.eta)
        return [dataclasses.asdict(row) for row in found]
