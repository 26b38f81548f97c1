"""``deltasam analyze ...``: measurements on the final weights of a run."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError
from deltasam.lab.cli._runs import bad_input, check_positive, strict, wide_console

if TYPE_CHECKING:
    from deltasam.lab.experiments import ConfigError

Found = TypeVar("Found")
_EXAMPLE = "must be a name, or a name with options such as '{name: FiniteDifference, radius: 0.5}'"


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """The run folders that are named, and those in other folders that are, at any depth.

    What holds no run stays in the list: it is told of when it cannot be measured.

    Raises:
        InputError: Nothing is named, or something that does not exist.
    """
    from deltasam.lab.report import run_folders

    if not folders:
        raise InputError("name at least one run folder, or a folder with run folders in it")
    for folder in folders:
        if not folder.exists():
            raise InputError(f"{folder}: no run folder, there is nothing of this name")
    return list(dict.fromkeys(run for folder in folders for run in (run_folders(folder) or [folder])))


def each_run(runs: Sequence[Path], measure: Callable[[Path], Found]) -> Iterator[tuple[Path, Found]]:
    """Measures one run after the other. Of several, those that cannot be measured are told of and left out.

    Those are: what is no run, runs that are not finished or have kept no weights, or whose weights or data are damaged
    or gone, runs of another method than the measurement is about, and runs whose weights it means nothing for.
    """
    from deltasam.lab.experiments import ConfigError

    refused: list[ConfigError] = []
    with bad_input():
        for run in runs:
            found = or_refusal(measure, run)
            if not isinstance(found, ConfigError):
                yield run, found
                continue
            refused.append(found)
            if len(runs) > 1:
                print(f"left out: {found}", file=sys.stderr)
        if len(refused) == len(runs):
            raise refused[0]


def or_refusal(measure: Callable[[Path], Found], run: Path) -> Found | ConfigError:
    """What is measured of a run, or why it cannot be."""
    from deltasam.lab.experiments import ConfigError, DivergedError

    try:
        return measure(run)
    except ConfigError as error:
        return error
    except DivergedError as error:
        return ConfigError(str(error))
    except ValueError as error:  # a DataError among them
        return ConfigError(f"{run}: {error}")


@dataclass(frozen=True, kw_only=True)
class _Analysis:
    """What all analyses are told."""

    folders: Positional[tuple[Path, ...]]
    """Run folders, or folders with run folders in them at any depth; several runs are compared."""

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
    """Print JSON instead of a table, with the values of every batch where there are several."""

    def run(self) -> None:
        """Measures every run and prints one table."""
        from deltasam.lab.cli._progress import quiet

        numbers = ("rho", "rows", "batch_size", "steps", "eta")
        check_positive(**{name: getattr(self, name, None) for name in numbers})
        runs = runs_in(self.folders)
        quiet()
        lines: list[dict[str, Any]] = []
        for _, (run_name, found) in each_run(runs, self._measured):
            name = {"run": run_name} if self.json or len(runs) > 1 else {}
            lines += [{**name, **line} for line in found]
        self._print(lines)

    def _measured(self, folder: Path) -> tuple[str, list[dict[str, Any]]]:
        """The name of a run, and its rows of the table."""
        from deltasam.lab.experiments import load_run

        data = None if self.data is None else str(self.data)
        config, loaded = load_run(folder, split=self.split, rows=self.rows, data=data)
        return config.run_name, self.measure(loaded.model, loaded.batches(self.batch_size), loaded.objective)

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """The rows of the table for one model."""
        raise NotImplementedError

    def _print(self, lines: list[dict[str, Any]]) -> None:
        if self.json:
            print(json.dumps(strict(lines), indent=2))
            return
        from rich.table import Table

        table = Table(
            *(head for head in lines[0] if head != "by_batch"), box=None, pad_edge=False, header_style="bold"
        )
        for line in lines:
            each = line.pop("by_batch", {})
            table.add_row(*(_cell(value, each.get(head, ())) for head, value in line.items()))
        wide_console().print(table, highlight=False)


def _cell(value: Any, each: Sequence[float]) -> str:
    """The number, with the 95% interval of the mean where several batches tell it."""
    if not isinstance(value, float):
        return str(value)
    if len(each) < 2 or not all(map(math.isfinite, each)):
        return f"{value:.4g}"
    from deltasam.lab.report import bootstrap_interval

    low, high = bootstrap_interval(each)
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"


def _weightings(given: Sequence[str], draws: int) -> dict[str, Any]:
    """Weightings by name and options; those along a random direction take the mean over so many."""
    import yaml

    from deltasam.lab.experiments import to_weighting

    if draws < 1:
        raise InputError(f"--draws {draws} must be at least 1")
    found = {}
    for words in given:
        try:
            named = yaml.safe_load(words)
        except yaml.YAMLError as error:
            raise InputError(f"--weightings {words}: {_EXAMPLE}") from error
        with bad_input():
            weighting: Any = to_weighting(named, "--weightings")
        if draws > 1 and getattr(weighting, "samples", None) == 1:
            weighting = dataclasses.replace(weighting, samples=draws)
        found[_name(named, weighting)] = weighting
    return found


def _name(given: Any, weighting: Any) -> str:
    """The class, with the options that were given: ``FiniteDifference(radius=2.0)``."""
    options = {key: value for key, value in given.items() if key != "name"} if isinstance(given, dict) else {}
    told = ", ".join(f"{key}={value}" for key, value in options.items())
    return type(weighting).__name__ + (f"({told})" if told else "")


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
class _OfWeightings(_Analysis):
    """What the analyses of delta-SAM's weights are told besides."""

    rows: int = 64
    """A fixed random sample of so many rows."""

    eta: float = 1e-4
    """Floor of the denominator of delta-SAM's weights."""

    draws: int = 1
    """Random directions per batch, for the weightings that have them; the paper takes one."""

    weightings: tuple[str, ...] = ()
    """Weightings of delta-SAM."""

    def run(self) -> None:
        """Looks up the weightings before anything is loaded."""
        _weightings(self.weightings, self.draws)
        super().run()


@dataclass(frozen=True, kw_only=True)
class Alignment(_OfWeightings):
    """Cosine of each method's gradient with that of exact per-instance SAM, at the final weights.

    With BERT-small on one core of a CPU, eight sentences take half a minute; `--rows` and `--weightings` make it
    shorter.
    """

    weightings: tuple[str, ...] = ("FiniteDifference", "Directional", "OwnGradient", "RandomWeights")
    """Weightings of delta-SAM by name, those of plugins too; with options: '{name: FiniteDifference, radius: 0.5}'."""

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """One row per method and weighting."""
        from deltasam.analysis import alignment

        chosen = _weightings(self.weightings, self.draws)
        found = alignment(model, batches, objective, rho=self.rho, eta=self.eta, weightings=chosen)
        return [dataclasses.asdict(row) for row in found]


@dataclass(frozen=True, kw_only=True)
class Weights(_OfWeightings):
    """Whether delta-SAM's weights g measure the instances or the rounding and the dropout masks, per estimator.

    With BERT-small on one core of a CPU, eight sentences and one estimator take half a minute; `--rows`,
    `--weightings` and `--conditions` make it shorter.
    """

    weightings: tuple[str, ...] = ("FiniteDifference", "Directional", "OwnGradient")
    """The estimators by name, those of plugins too; with options: '{name: FiniteDifference, radius: 0.5}'."""

    conditions: tuple[
        Literal[
            "float64", "float32", "bf16", "another direction", "dropout, shared masks", "dropout, independent masks"
        ],
        ...,
    ] = ("float64", "float32", "bf16", "another direction", "dropout, shared masks", "dropout, independent masks")
    """What is compared with float64 without dropout."""

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """One row per weighting and condition."""
        from deltasam.analysis import weights_quality

        chosen = _weightings(self.weightings, self.draws)
        found = weights_quality(
            model, batches, objective, rho=self.rho, eta=self.eta, weightings=chosen, conditions=self.conditions
        )
        return [dataclasses.asdict(row) for row in found]
