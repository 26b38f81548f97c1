"""``deltasam analyze ...``: measurements on the final weights of runs, printed as a table."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from deltasam.lab.cli._arguments import check_positive
from deltasam.lab.cli._errors import InputError, one_line_errors
from deltasam.lab.cli._output import plain_table, print_note, silence_libraries, wide_console, without_nan
from deltasam.lab.cli._run_folders import OnRuns, each_run


@dataclass(frozen=True, kw_only=True)
class _Analysis(OnRuns):
    """Options of all analyses. ``legend`` explains the columns and their units below the table."""

    legend: ClassVar[tuple[str, ...]] = ()

    rho: float = 0.05
    """Radius of the perturbations."""

    split: str | None = None
    """The split. Defaults to the one that the run was evaluated on."""

    json: bool = False
    """Print JSON instead of a table, with the values of each batch if there are several."""

    def run(self) -> None:
        """Measures every run and prints one table."""
        numbers = ("rho", "rows", "batch_size", "steps", "eta")
        check_positive(**{name: getattr(self, name, None) for name in numbers})
        runs = self.runs()
        silence_libraries()
        lines: list[dict[str, Any]] = []
        for _, (run_name, found) in each_run(runs, self._measured):
            name = {"run": run_name} if self.json or len(runs) > 1 else {}
            lines += [{**name, **line} for line in found]
        self._print(lines)

    def _measured(self, folder: Path) -> tuple[str, list[dict[str, Any]]]:
        """Returns the name of a run and its rows of the table."""
        from deltasam.lab.experiments import attention_without_nan, load_run
        from deltasam.step.names import pluralized

        config, loaded = load_run(folder, split=self.split, rows=self.rows, data=self.data_folder)
        batches = loaded.batches(self.batch_size)
        print_note(f"  {pluralized(len(loaded.rows), 'row')} of {loaded.origin} in {len(batches)} batches")
        with attention_without_nan():  # `analyze weights` also measures under bf16 autocast
            return config.run_name, self.measure(loaded.model, batches, loaded.objective)

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """Returns the rows of the table for one model."""
        raise NotImplementedError

    def _print(self, lines: list[dict[str, Any]]) -> None:
        if self.json:
            print(json.dumps(without_nan(lines), indent=2))
            return
        table = plain_table(*(head for head in lines[0] if head != "by_batch"))
        by_batch = [line.pop("by_batch", {}) for line in lines]
        for line, each in zip(lines, by_batch, strict=True):
            table.add_row(*(_cell(value, each.get(head, ())) for head, value in line.items()))
        console = wide_console()
        console.print(table, highlight=False)
        several = any(len(values) > 1 for each in by_batch for values in each.values())
        intervals = ("In brackets: 95% bootstrap interval of the mean over batches.",) if several else ()
        for text in ("", *self.legend, *intervals):
            console.print(text, highlight=False)


def _cell(value: Any, each: Sequence[float]) -> str:
    """Formats a number, with the 95% interval of the mean if there are several batches."""
    if not isinstance(value, float):
        return str(value)
    if len(each) < 2 or not all(map(math.isfinite, each)):
        return f"{value:.4g}"
    from deltasam.lab.report import bootstrap_interval

    low, high = bootstrap_interval(each)
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"


@dataclass(frozen=True, kw_only=True)
class AdversarialRisk(_Analysis):
    """Computes the loss under the worst perturbation of each instance (the paper's Table 4), and the plain loss."""

    legend = (
        "adversarial risk, loss: mean loss per instance, in the unit of the objective (cross-entropy: nats). The risk",
        "is taken at the worst weights within the Euclidean distance rho, found for each instance alone.",
    )

    steps: int = 1
    """Ascent steps inside the ball; the paper takes 1."""

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """Returns adversarial risk and loss."""
        from deltasam.analysis import adversarial_risk

        risk = adversarial_risk(model, batches, objective, rho=self.rho, steps=self.steps)
        return [{"adversarial risk": risk.value, "loss": risk.clean, "rho": self.rho, "rows": len(risk.losses)}]


@dataclass(frozen=True, kw_only=True)
class Sharpness(_Analysis):
    """Computes how much the loss rises under the worst perturbation of a batch, and of each instance."""

    legend = (
        "Rise of the mean loss, in the unit of the objective (cross-entropy: nats), within the Euclidean distance rho",
        "of the weights. R_batch: one perturbation per batch, as SAM makes it. R_inst: one per instance. first order:",
        "R_inst if the loss were linear, rho times the mean norm of the gradients.",
    )

    steps: int = 1
    """Ascent steps inside the ball."""

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """Returns R_batch, R_inst and R_inst to first order."""
        from deltasam.analysis import sharpness

        found = sharpness(model, batches, objective, rho=self.rho, steps=self.steps)
        return [{"R_batch": found.batch, "R_inst": found.instance, "first order": found.first_order, "rho": self.rho}]


@dataclass(frozen=True, kw_only=True)
class _OfWeightings(_Analysis):
    """Options of the analyses of delta-SAM's weights."""

    rows: int = 64
    """Size of the fixed random sample of rows."""

    eta: float = 1e-4
    """Lower bound of the denominator of delta-SAM's weights."""

    draws: int = 1
    """Random directions per batch, for weightings that use them; the paper takes one."""

    weightings: tuple[str, ...] = ()
    """Weightings of delta-SAM."""

    def run(self) -> None:
        """Looks up the weightings before anything is loaded."""
        _weightings(self.weightings, self.draws)
        super().run()


@dataclass(frozen=True, kw_only=True)
class Alignment(_OfWeightings):
    """Computes the cosine of each method's gradient with that of exact per-instance SAM, at the final weights.

    BERT-small takes half a minute for eight sentences on one CPU core. Use fewer `--rows` or `--weightings` to save
    time.
    """

    legend = (
        "Cosines with exact per-instance SAM, from -1 to 1, without a unit; 1 is the same direction. update: of the",
        "gradients that train the model. regulariser: of their differences to the plain gradient.",
    )

    weightings: tuple[str, ...] = ("FiniteDifference", "Directional", "OwnGradient", "RandomWeights")
    """Weightings of delta-SAM, by name or with options: '{name: FiniteDifference, radius: 0.5}'. Plugins work, too."""

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """Returns one row per method and weighting."""
        from deltasam.analysis import alignment

        chosen = _weightings(self.weightings, self.draws)
        found = alignment(model, batches, objective, rho=self.rho, eta=self.eta, weightings=chosen)
        return [dataclasses.asdict(row) for row in found]


@dataclass(frozen=True, kw_only=True)
class Weights(_OfWeightings):
    """Measures how much of delta-SAM's weights is signal, and how much is rounding or dropout noise.

    BERT-small takes half a minute for eight sentences and one weighting on one CPU core. Use fewer `--rows`,
    `--weightings` or `--conditions` to save time.
    """

    legend = (
        "All numbers are without a unit and compare with the same weights in float64 without dropout. spearman: rank",
        "correlation. snr: variance of the signal over that of the noise; above 1 there is more signal. ideal: rank",
        "correlation with a_i ||grad_i||, the weights of theory. median: median weight.",
    )

    weightings: tuple[str, ...] = ("FiniteDifference", "Directional", "OwnGradient")
    """Weightings of delta-SAM, by name or with options: '{name: FiniteDifference, radius: 0.5}'. Plugins work, too."""

    conditions: tuple[
        Literal[
            "float64", "float32", "bf16", "another direction", "dropout, shared masks", "dropout, independent masks"
        ],
        ...,
    ] = ("float64", "float32", "bf16", "another direction", "dropout, shared masks", "dropout, independent masks")
    """Conditions to compare with float64 without dropout."""

    def measure(self, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
        """Returns one row per weighting and condition."""
        from deltasam.analysis import weights_quality

        chosen = _weightings(self.weightings, self.draws)
        found = weights_quality(
            model, batches, objective, rho=self.rho, eta=self.eta, weightings=chosen, conditions=self.conditions
        )
        return [dataclasses.asdict(row) for row in found]


def _weightings(given: Sequence[str], draws: int) -> dict[str, Any]:
    """Returns the weightings by name; those that use a random direction average over ``draws`` of them."""
    import yaml

    from deltasam.lab.experiments import to_weighting

    if draws < 1:
        raise InputError(f"--draws {draws} must be at least 1")
    found = {}
    for text in given:
        try:
            named = yaml.safe_load(text)
        except yaml.YAMLError as error:
            expected = "must be a name, or a name with options such as '{name: FiniteDifference, radius: 0.5}'"
            raise InputError(f"--weightings {text}: {expected}") from error
        with one_line_errors():
            weighting: Any = to_weighting(named, "--weightings")
        if draws > 1 and getattr(weighting, "samples", None) == 1:
            weighting = dataclasses.replace(weighting, samples=draws)
        options = {key: value for key, value in named.items() if key != "name"} if isinstance(named, dict) else {}
        listed = ", ".join(f"{key}={value}" for key, value in options.items())
        found[type(weighting).__name__ + (f"({listed})" if listed else "")] = weighting
    return found
