"""Compares the wall time of whole trainings, for each method and way of running it.

The caller runs the trainings: ``deltasam bench train`` runs them as ``deltasam train`` does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from deltasam.lab.bench._clock import Spread
from deltasam.lab.bench._output import print_table, spread_text, write_record
from deltasam.lab.bench.options import Way
from deltasam.lab.commit import commit


@dataclass(frozen=True)
class Training:
    """A method, by the name that the user gave, and how to run its steps."""

    method: str
    way: Way

    @property
    def name(self) -> str:
        """The name in tables and of folders."""
        return self.method if self.way == "eager" else f"{self.method} {self.way}"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of one training.

    Attributes:
        train_seconds: Wall time of the training, with loading of the model and without evaluation.
        seconds_per_update: Median time between two updates.
        updates: Number of updates.
        forwards: Forward passes of all updates.
        backwards: Backward passes of all updates.
        skipped: Number of steps without perturbation.
        metric: Name of the primary metric.
        value: Value of the primary metric.
        peak_bytes: Peak memory of the GPU, or of the process on a CPU, until the end of this training.
        device: The device.
        prepare_seconds: Wall time of the first steps, which compile or record, if they are not in ``train_seconds``.
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
    prepare_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """The results of one method in one way. Ratios are computed within a repetition; None without eager SAM or ERM."""

    name: str
    method: str
    way: Way
    seconds: Spread
    times_sam: Spread | None
    times_erm: Spread | None
    runs: tuple[Trained, ...]


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """The results of a benchmark of trainings."""

    options: Mapping[str, Any]
    rows: tuple[TrainRow, ...]
    machine: Mapping[str, str]


Run = Callable[[Training, int], Trained | None]


def measure(
    plan: Sequence[Training], run: Run, *, repeats: int, options: Mapping[str, Any], machine: Mapping[str, str]
) -> TrainReport:
    """Runs all trainings in turn, ``repeats`` times.

    Args:
        plan: The trainings.
        run: Runs a training; it also gets the number of the repetition. A training for which it returns None, for
            example because it failed, is left out.
        repeats: Number of repetitions.
        options: The options, for the report.
        machine: Facts about the machine, for the report.
    """
    made: dict[Training, list[Trained]] = {each: [] for each in plan}
    for number in range(repeats):
        for each in plan:
            one = run(each, number)
            if one is None:
                made.pop(each, None)
            elif each in made:
                made[each].append(one)
    seconds = {each: [one.train_seconds for one in runs] for each, runs in made.items()}

    def relative_to(base: str, each: Training) -> Spread | None:
        eager = (s for other, s in seconds.items() if other.way == "eager" and other.method.lower() == base)
        theirs = next(eager, None)
        return None if theirs is None else Spread.of([a / b for a, b in zip(seconds[each], theirs, strict=True)])

    rows = tuple(
        TrainRow(
            name=each.name,
            method=each.method,
            way=each.way,
            seconds=Spread.of(seconds[each]),
            times_sam=relative_to("sam", each),
            times_erm=relative_to("erm", each),
            runs=tuple(runs),
        )
        for each, runs in made.items()
    )
    facts = {**machine, "commit": commit() or "unknown", "device": rows[0].runs[0].device if rows else ""}
    return TrainReport(options=dict(options), rows=rows, machine=facts)


def median_gap(times: Sequence[float]) -> float | None:
    """Returns the median time between two updates, or None if there were fewer than two."""
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return statistics.median(gaps) if gaps else None


def show(report: TrainReport) -> None:
    """Prints the table."""
    options, rows = report.options, report.rows
    first = rows[0].runs[0]
    title = (
        f"training {options['task']} with {options['model']}, {first.updates} updates, {options['precision']}, "
        f"{report.machine['device']}, torch {report.machine['torch']}"
    )
    columns = {
        "method": [row.name for row in rows],
        "seconds": [_text(row.seconds, ".1f") for row in rows],
        "before": [_preparing(row) for row in rows],
        "x SAM": [_text(row.times_sam, ".2f") for row in rows],
        "x ERM": [_text(row.times_erm, ".2f") for row in rows],
        "ms/update": [_milliseconds(row) for row in rows],
        "passes": [f"{row.runs[0].forwards}/{row.runs[0].backwards}" for row in rows],
        first.metric: [f"{statistics.mean(run.value for run in row.runs):.4f}" for row in rows],
    }
    if any(columns["before"]):
        notes = [
            "seconds: wall time of the updates; before: of the first steps, which compile or record; ratios to eager"
        ]
    else:
        notes = ["seconds: wall time of the training with loading, without evaluation; ratios to the eager runs"]
    if options["repeats"] > 1:
        notes += [f"median of {options['repeats']} ± half the interquartile range"]
    print_table(title, columns, notes)


def write_json(report: TrainReport, path: Path) -> None:
    """Writes the report."""
    write_record({"part": "train", **asdict(report)}, path)


def _text(spread: Spread | None, form: str) -> str:
    """Formats a median, with its spread if the repetitions differ."""
    return f"{spread.median:{form}}" if spread and spread.high == spread.low else spread_text(spread, form)


def _preparing(row: TrainRow) -> str:
    known = [run.prepare_seconds for run in row.runs if run.prepare_seconds is not None]
    return f"{statistics.median(known):.1f}" if known else ""


def _milliseconds(row: TrainRow) -> str:
    known = [run.seconds_per_update for run in row.runs if run.seconds_per_update is not None]
    return f"{statistics.median(known) * 1e3:.1f}" if known else ""
