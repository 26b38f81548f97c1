"""Whole trainings side by side: wall time of each method and way of running it, from the first batch to the last.

How a training is run is the caller's: the command ``deltasam bench train`` hands in the path of ``deltasam train``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deltasam.lab.bench._clock import Spread
from deltasam.lab.bench._table import print_table
from deltasam.lab.bench.options import TrainWay
from deltasam.lab.commit import commit


@dataclass(frozen=True)
class Training:
    """What is trained: a method, as it was named, and how its steps are run."""

    method: str
    way: TrainWay

    @property
    def name(self) -> str:
        """For tables and folders."""
        return self.method if self.way == "eager" else f"{self.method} {self.way}"


@dataclass
class Pace:
    """Called after every update, as the watch of a run: when each of them was done."""

    _times: list[float] = field(default_factory=list)

    def __call__(self, *_: Any) -> None:
        """Notes the time."""
        self._times.append(time.perf_counter())

    @property
    def seconds(self) -> float | None:
        """Median time from one update to the next; None if there were not two."""
        gaps = [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
        return statistics.median(gaps) if gaps else None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one training came to, as far as it is compared.

    Attributes:
        train_seconds: Wall time of the training without evaluation, the model's loading included.
        seconds_per_update: Median time from one update to the next.
        updates: Number of updates.
        forwards: Forward passes of all updates.
        backwards: Backward passes of all updates.
        skipped: Steps that left the perturbation out.
        metric: Name of the metric, and
        value: what it came to.
        peak_bytes: Of the GPU's memory, or of the process on a CPU, up to the end of this training.
        device: Where it ran.
    """

    train_seconds: float
    seconds_per_update: float | None
    updates: int
    forwards: int
    backwards: int
    skipped: int
    metric: str
    value: float
    peak_bytes: int
    device: str


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """One method in one way; ratios are taken within a repetition. What could not be compared is None."""

    name: str
    method: str
    way: TrainWay
    seconds: Spread
    times_sam: Spread | None
    times_erm: Spread | None
    runs: tuple[Trained, ...]


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """All rows, and what was trained on what."""

    options: Mapping[str, Any]
    rows: tuple[TrainRow, ...]
    machine: Mapping[str, str]


Run = Callable[[Training, int], Trained]


def measure(
    plan: Sequence[Training], run: Run, *, repeats: int, options: Mapping[str, Any], machine: Mapping[str, str]
) -> TrainReport:
    """Trains all of the plan in turn, ``repeats`` times.

    Args:
        plan: What to train.
        run: Takes a training and the number of the repetition.
        repeats: How often.
        options: What was asked for, for the record.
        machine: What it ran on, for the record.
    """
    made: dict[Training, list[Trained]] = {each: [] for each in plan}
    for number in range(repeats):
        for each in plan:
            made[each].append(run(each, number))
    seconds = {each: [one.train_seconds for one in runs] for each, runs in made.items()}

    def against(each: Training, base: str) -> Spread | None:
        ours = seconds[each]
        theirs = next((s for other, s in seconds.items() if _is(other, base)), None)
        return None if theirs is None else Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])

    rows = tuple(
        TrainRow(
            name=each.name,
            method=each.method,
            way=each.way,
            seconds=Spread.of(seconds[each]),
            times_sam=against(each, "sam"),
            times_erm=against(each, "erm"),
            runs=tuple(runs),
        )
        for each, runs in made.items()
    )
    facts = {**machine, "commit": commit() or "unknown", "device": rows[0].runs[0].device}
    return TrainReport(options=dict(options), rows=rows, machine=facts)


def show(report: TrainReport) -> None:
    """Prints the table."""
    options = report.options
    first = report.rows[0].runs[0]
    title = (
        f"training {options['task']} with {options['model']}, {first.updates} updates, {options['precision']}, "
        f"{report.machine['device']}, torch {report.machine['torch']}"
    )
    notes = ["seconds: wall time of the training, loading included, evaluation not; ratios to the eager runs"]
    if options["repeats"] > 1:
        notes += [f"median of {options['repeats']} ± half the distance of the quartiles"]
    print_table(title, *cells(report), notes)


def cells(report: TrainReport) -> tuple[list[str], list[list[str]]]:
    """The table as text, without the columns that nothing is known for."""
    metric = report.rows[0].runs[0].metric
    columns = {
        "method": [row.name for row in report.rows],
        "seconds": [_spread(row.seconds, ".1f") for row in report.rows],
        "x SAM": [_spread(row.times_sam, ".2f") for row in report.rows],
        "x ERM": [_spread(row.times_erm, ".2f") for row in report.rows],
        "ms/update": [_milliseconds(row) for row in report.rows],
        "passes": [f"{row.runs[0].forwards}/{row.runs[0].backwards}" for row in report.rows],
        metric: [f"{statistics.mean(run.value for run in row.runs):.4f}" for row in report.rows],
    }
    known = {name: column for name, column in columns.items() if any(column)}
    return list(known), [list(row) for row in zip(*known.values(), strict=True)]


def write_json(report: TrainReport, path: Path) -> None:
    """Writes everything."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"part": "train", **asdict(report)}, indent=2, default=str) + "\n")


def _is(training: Training, base: str) -> bool:
    return training.way == "eager" and training.method.lower() == base


def _spread(spread: Spread | None, form: str) -> str:
    if spread is None:
        return ""
    around = f" ±{(spread.high - spread.low) / 2:{form}}" if spread.high > spread.low else ""
    return f"{spread.median:{form}}{around}"


def _milliseconds(row: TrainRow) -> str:
    known = [run.seconds_per_update for run in row.runs if run.seconds_per_update is not None]
    return f"{statistics.median(known) * 1e3:.1f}" if known else ""
