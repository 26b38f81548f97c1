"""The measurements in ``results/speed`` as tables: ratios with their targets, times, memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from deltasam.lab.pages.measurements import loaded
from deltasam.lab.pages.statistics import table

Record = dict[str, Any]

AXES = {  # figure: (heading of the axis, the options that its measurements share, the place of a measurement)
    "instances": ("instances N", {"model": "bert-base", "length": 64}, lambda r: r["options"]["batch"]),
    "tokens": ("tokens T", {"model": "bert-base", "batch": 16}, lambda r: r["options"]["length"]),
    "parameters": (
        "million parameters", {"batch": 16, "length": 64}, lambda r: int(r["machine"]["parameters"]) / 1e6,
    ),
}  # fmt: skip
SHAPES = list(product(("bert-base", "roberta-large"), ("16 x 64", "32 x 128"), ("bf16", "tf32")))
CPU_TARGETS = {("bert-4x256", 16, 64): 1.25, ("bert-2x768", 8, 128): 1.05, ("bert-2x768", 16, 64): 1.05}


@dataclass(frozen=True)
class Ratio:
    """A ratio of two steps, with the most it should be in bf16 and in TF32.

    Attributes:
        name: What the table calls it.
        above: The step in the numerator,
        below: and the one in the denominator, times
        times: this.
        targets: For bf16 and TF32.
        size: The targets are for this size only.
        memory: Compare peak memory, not time: beyond weights and optimizer, or in total.
    """

    name: str
    above: str
    below: str
    targets: tuple[float, float]
    size: str | None = None
    times: float = 1.0
    memory: str | None = None

    def of(self, record: Record) -> tuple[float, float | None] | None:
        """The ratio and its spread; None if a step was not measured."""
        if self.memory is not None:
            found = memory_ratio(record, self.above, self.below, total=self.memory == "total")
            return None if found is None else (found, None)
        both = ratio(record, self.above, self.below)
        return None if both is None else (both[0] / self.times, both[1] / self.times)


RATIOS = [
    Ratio("captured SAM / (2 x captured ERM)", "SAM captured", "ERM captured", (1.03, 1.03), times=2),
    Ratio("captured delta-SAM / captured SAM", "DeltaSAM-ambient captured", "SAM captured", (1.38, 1.38)),
    Ratio("the same with `probe_every=4`", "DeltaSAM-every-4 captured", "SAM captured", (1.12, 1.12)),
    Ratio("captured exact per-instance / captured SAM", "PerInstanceSAM captured", "SAM captured", (1.12, 1.08)),
    Ratio("captured delta-SAM / *eager* ERM", "DeltaSAM-ambient captured", "ERM", (0.8, 1.0), size="16 x 64"),
    Ratio("captured + compiled SAM / captured SAM", "SAM compiled+captured", "SAM captured", (0.75, 0.9)),
    Ratio("eager exact per-instance / eager SAM", "PerInstanceSAM", "SAM", (1.5, 1.5)),
]
MEMORY = [
    Ratio(f"{name}, {way.strip() or 'eager'}, {scope}", f"{step}{way}", f"SAM{way}", (1.4, 1.4), "32 x 128",
          memory=scope)
    for (name, step), way, scope in product(
        (("per-instance", "PerInstanceSAM"), ('per-instance, `factors="exact"`', "PerInstanceSAM-exact")),
        (" captured", ""), ("total", "beyond weights and optimizer"),
    )
]  # fmt: skip


@lru_cache
def measured(results: Path, part: str) -> list[Record]:
    """The measurements of a part that did not fail."""
    return [record for record in loaded(results / "speed" / part) if "failed" not in record]


def row_of(record: Record, name: str) -> Record | None:
    """One step of a measurement."""
    return next((row for row in record["rows"] if row["name"] == name), None)


def ratio(record: Record, above: str, below: str) -> tuple[float, float] | None:
    """Median of the ratios within the rounds, and half the distance between the quartiles."""
    a, b = row_of(record, above), row_of(record, below)
    if a is None or b is None:
        return None
    values = [x / y for x, y in zip(a["rounds"], b["rounds"], strict=True)]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return median, (high - low) / 2


def memory_ratio(record: Record, above: str, below: str, *, total: bool) -> float | None:
    """Ratio of the peak memory; the total has the weights and AdamW's two moments, three copies of the parameters."""
    peaks = [None if row is None else row["peak_bytes"] for row in (row_of(record, above), row_of(record, below))]
    if None in peaks:
        return None
    more = 3 * int(record["machine"]["parameter_bytes"]) if total else 0
    return float((peaks[0] + more) / (peaks[1] + more))


def shape(record: Record) -> tuple[str, str, str]:
    """Model, size and precision."""
    options = record["options"]
    return options["model"], f"{options['batch']} x {options['length']}", options["precision"]


def ratios(results: Path, wanted: Sequence[Ratio]) -> str:
    """A row for every ratio, a column for every shape; a check mark or a cross compares it with the target."""
    records = [r for part in ("eager", "figures", "compiled") for r in measured(results, part)]
    rows = []
    for figure in wanted:
        cells = []
        for place in SHAPES:
            found = next((v for r in records if shape(r) == place if (v := figure.of(r)) is not None), None)
            target = figure.targets[place[2] == "tf32"] if figure.size in (None, place[1]) else None
            cells.append("-" if found is None else marked(*found, target))
        aim = " / ".join(f"{target:g}" for target in dict.fromkeys(figure.targets))
        rows.append([figure.name, aim + (f" at {figure.size}" if figure.size else ""), *cells])
    precisions = {"bf16": "bf16", "tf32": "TF32"}
    head = [f"{model}, {size}, {precisions[precision]}" for model, size, precision in SHAPES]
    return table(["ratio", "at most (bf16 / TF32)", *head], rows)


def marked(value: float, spread: float | None, target: float | None) -> str:
    """A ratio, its spread, and whether it keeps to the target when rounded to two digits."""
    mark = "" if target is None else " ✓" if round(value, 2) <= target else " ✗"
    return f"{value:.2f}{'' if spread is None else f' ±{spread:.2f}'}{mark}"


def steps(results: Path) -> str:
    """Every step of every measurement behind the ratios."""
    rows = []
    for part in ("eager", "figures", "compiled"):
        for record in measured(results, part):
            for row in record["rows"]:
                seconds, peak = row["seconds"], row.get("peak_bytes")
                rows.append([
                    part, *shape(record), row["name"], f"{seconds['median'] * 1e3:.1f}",
                    f"{(seconds['high'] - seconds['low']) / 2 * 1e3:.1f}",
                    f"{row['times_erm']['median']:.2f}", f"{row['times_sam']['median']:.2f}",
                    "" if row["forwards"] is None else f"{row['forwards']:g}/{row['backwards']:g}",
                    "" if peak is None else f"{peak / 2**30:.2f}",
                ])  # fmt: skip
    head = ["part", "model", "size", "precision", "step", "ms", "±", "x eager ERM", "x eager SAM", "passes", "GiB"]
    return table(head, rows)


def provenance(results: Path) -> str:
    """The machine, the commits and the commands of every part."""
    rows = []
    for part in ("figures", "eager", "compiled", "growth", "loop", "cpu", "adamw"):
        records = measured(results, part)
        machines = sorted({f"{r['machine']['device']}, torch {r['machine']['torch']}" for r in records})
        commits = sorted({r["machine"]["commit"] for r in records})
        commands = sorted({f"`PYTHONPATH=src {r['command']}`" for r in records})
        rows.append([part, "; ".join(machines), ", ".join(commits), "<br>".join(commands)])
    return table(["part", "machine", "commit", "command"], rows)


def milliseconds(record: Record, name: str) -> str:
    """The median time of a step."""
    row = row_of(record, name)
    return "-" if row is None else f"{row['seconds']['median'] * 1e3:.1f}"


def times(record: Record, above: str, below: str) -> str:
    """The ratio of two steps."""
    found = ratio(record, above, below)
    return "-" if found is None else f"{found[0]:.2f}"


def on_axis(results: Path, axis: str) -> list[tuple[float, Record]]:
    """The measurements of an axis, with their places on it."""
    _, shared, place = AXES[axis]
    records = [r for r in measured(results, "growth") if {name: r["options"][name] for name in shared} == shared]
    return sorted(((place(record), record) for record in records), key=lambda pair: pair[0])


def growth(results: Path, axis: str) -> str:
    """How time and memory grow along an axis."""
    rows = []
    for place, record in on_axis(results, axis):
        memory = memory_ratio(record, "PerInstanceSAM captured", "SAM captured", total=True)
        rows.append([
            f"{place:.0f}", milliseconds(record, "SAM captured"),
            *(times(record, f"{method}{way}", f"SAM{way}")
              for way in (" captured", "") for method in ("DeltaSAM-ambient", "PerInstanceSAM")),
            "-" if memory is None else f"{memory:.2f}",
            f"{record['engine']['low-rank']} + {record['engine']['materialised']}",
        ])  # fmt: skip
    head = ("SAM, ms", "delta-SAM / SAM", "per-instance / SAM", "eager: delta-SAM / SAM", "eager: per-instance / SAM",
            "memory: per-instance / SAM", "low rank + full matrix")  # fmt: skip
    return table([AXES[axis][0], *head], rows)


def loop(results: Path) -> str:
    """Per-instance gradients one after the other, compared with the engine."""
    slow, ours, rows = "PerInstanceSAM-loop", "PerInstanceSAM", []
    for record in measured(results, "loop"):
        numbers = [milliseconds(record, name) for name in (slow, ours, f"{ours} captured", "SAM")]
        against = [times(record, slow, name) for name in (ours, f"{ours} captured", "SAM")]
        rows.append([", ".join(shape(record)), *numbers, *against])
    head = ["", "loop, ms", "engine, ms", "engine captured, ms", "SAM, ms", "loop / engine", "loop / captured",
            "loop / SAM"]  # fmt: skip
    return table(head, rows)


def trainings(results: Path) -> str:
    """Whole trainings; captured delta-SAM should take at most half of the time of eager SAM."""
    rows = []
    for record in measured(results, "train"):
        for row in record["rows"]:
            target = 0.5 if row["name"] == "delta-sam captured" else None
            pace = [run["seconds_per_update"] for run in row["runs"]]
            rows.append([row["name"], f"{row['seconds']['median']:.1f}", marked(row["times_sam"]["median"], None, target),
                         f"{statistics.median(pace) * 1e3:.1f}",
                         f"{row['runs'][0]['forwards']}/{row['runs'][0]['backwards']}"])  # fmt: skip
    return table(["training", "seconds", "x eager SAM", "ms per update", "passes"], rows)


def cpu(results: Path) -> str:
    """Exact per-instance perturbation on a CPU."""
    rows = []
    for record in measured(results, "cpu"):
        options = record["options"]
        target = CPU_TARGETS[options["model"], options["batch"], options["length"]]
        value, spread = ratio(record, "PerInstanceSAM", "SAM") or (float("nan"), 0.0)
        rows.append([", ".join(shape(record)),
                     *(milliseconds(record, name) for name in ("SAM", "PerInstanceSAM", "PerInstanceSAM-loop")),
                     marked(value, spread, target), f"{target}",
                     times(record, "PerInstanceSAM-loop", "PerInstanceSAM")])  # fmt: skip
    return table(["", "SAM, ms", "engine, ms", "loop, ms", "engine / SAM", "at most", "loop / engine"], rows)


def adamw(results: Path) -> str:
    """The implementations of AdamW on a CPU."""
    rows = []
    for record in measured(results, "adamw"):
        for kind in record["options"]["adamw"]:
            suffix = "" if kind == "fused" else f", {kind} AdamW"
            names = [f"{step}{suffix}" for step in ("ERM", "SAM")]
            found = [ratio(record, name, name.partition(",")[0]) or (float("nan"), 0.0) for name in names]
            rows.append([shape(record)[1], kind, *(milliseconds(record, name) for name in names),
                         *(f"{value:.2f} ±{spread:.2f}" for value, spread in found)])  # fmt: skip
    return table(["size", "AdamW", "ERM, ms", "SAM, ms", "ERM / fused", "SAM / fused"], rows)
