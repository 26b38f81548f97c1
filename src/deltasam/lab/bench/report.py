"""The results: as a record, a table in the terminal, a JSON file, a plot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from deltasam.lab.bench._clock import Spread
from deltasam.lab.bench._table import print_table
from deltasam.lab.bench.options import StepOptions, Way
from deltasam.step.names import counted


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate. Ratios are taken within each round; what was not measured is None.

    Attributes:
        name: The method, or the package and the method.
        origin: Ours or the field's.
        seconds: Time of a step.
        times_erm: Time as a multiple of plain training.
        times_sam: Time as a multiple of our SAM.
        times_ours: In the isolated measurement, time as a multiple of ours.
        method: The method alone, and
        way: how it was run.
        forwards: Forward passes of a step, in batches, counted by hooks.
        backwards: Backward passes of a step, likewise.
        extra_copies: Peak memory beyond plain training, in copies of the parameters.
        peak_bytes: Peak memory beyond the weights and without an optimizer; what CUDA graphs keep is counted in full.
        memory_times_sam: The same as a multiple of our SAM run in the same way.
        in_a_row: Steps in a turn.
        rounds: Seconds of a step in every round; the same position means the same round in all rows.
    """

    name: str
    origin: Literal["deltasam", "third_party"]
    seconds: Spread
    times_erm: Spread | None = None
    times_sam: Spread | None = None
    times_ours: Spread | None = None
    forwards: float | None = None
    backwards: float | None = None
    extra_copies: float | None = None
    peak_bytes: int | None = None
    memory_times_sam: float | None = None
    in_a_row: int = 1
    method: str = ""
    way: Way = "eager"
    rounds: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """All rows, who could not run and why, what was measured on, and how the per-instance engine kept the layers."""

    options: StepOptions
    rows: tuple[Row, ...]
    failures: dict[str, str]
    machine: dict[str, str]
    engine: dict[str, int] | None = None

    @property
    def title(self) -> str:
        """One line that says what was measured."""
        options, machine = self.options, self.machine
        what = "norm + perturb + restore" if options.isolate else "one training step, AdamW included"
        size = f"{int(machine['parameters']) / 1e6:.1f}M parameters"
        shape = "" if options.isolate else f", {options.batch} x {options.length}, dropout {options.dropout:g}"
        threads = counted(int(machine["threads"]), "thread")
        where = f"{machine['device']}, {threads}, torch {machine['torch']}"
        return f"{what}: {options.shape}, {size}{shape}, {options.precision}, {where}, {options.clock} clock"


def cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """The table as text: its header and its rows, without the columns that were not measured."""
    columns = {
        "method": [row.name for row in report.rows],
        "ms": [f"{row.seconds.median * 1e3:.1f} ±{_half(row.seconds) * 1e3:.1f}" for row in report.rows],
        "x ERM": [_ratio(row.times_erm) for row in report.rows],
        "x SAM": [_ratio(row.times_sam) for row in report.rows],
        "x ours": [_ratio(row.times_ours) for row in report.rows],
        "passes": [_passes(row) for row in report.rows],
        "MiB": ["" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f}" for row in report.rows],
        "memory": ["" if row.extra_copies is None else f"{row.extra_copies:+.2f}" for row in report.rows],
    }
    measured = {name: column for name, column in columns.items() if any(column)}
    return list(measured), [list(row) for row in zip(*measured.values(), strict=True)]


def show(report: Report) -> None:
    """Prints the table."""
    header, rows = cells(report)
    note = "median ± half the distance of the quartiles"
    if not report.options.isolate:
        note += "; passes: forward/backward, counted by hooks"
    if any(row.peak_bytes is not None for row in report.rows):
        note += (
            "; MiB: peak beyond the weights, no optimizer; memory: the same beyond ERM, in copies of the parameters"
        )
    notes = [note, *(f"{name} could not run here: {why}" for name, why in report.failures.items())]
    print_table(report.title, header, rows, notes)


def record(report: Report, **more: str) -> dict[str, Any]:
    """Everything as plain data, options and machine included, but for where the files go; ``more`` goes on top."""
    plain = asdict(report)
    for name in ("json", "plot"):
        del plain["options"][name]
    return {**more, **plain}


def write_json(report: Report, path: Path) -> None:
    """Writes everything."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record(report), indent=2, default=str) + "\n")


def plot(report: Report, path: Path) -> None:
    """Bars of the ratio to SAM, the time and the memory, with their quartiles; needs matplotlib."""
    from deltasam.lab.bench._plot import draw

    draw(report, path)


def _ratio(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f} ±{_half(spread):.2f}"


def _half(spread: Spread) -> float:
    return (spread.high - spread.low) / 2


def _passes(row: Row) -> str:
    return "" if row.forwards is None or row.backwards is None else f"{row.forwards:.3g}/{row.backwards:.3g}"
