"""The measurements in ``results/speed`` as tables: ratios with their targets, times, memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from deltasam.lab.pages.measurements import loaded
from deltasam.lab.pages.statistics import table

Record = dict[str, Any]
Columns = Mapping[str, Callable[[Record], str]]
"""Heading -> cell of a measurement."""

STEPS = ("eager", "figures", "compiled")  # the parts behind the ratios; the first that has a ratio counts
SHAPES = list(product(("bert-base", "roberta-large"), ("16 x 64", "32 x 128"), ("bf16", "tf32")))
SLOW, OURS = "PerInstanceSAM-loop", "PerInstanceSAM"


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
    a, b = ((row_of(record, name) or {}).get("peak_bytes") for name in (above, below))
    more = 3 * int(record["machine"]["parameter_bytes"]) if total else 0
    return None if a is None or b is None else float((a + more) / (b + more))


@dataclass(frozen=True)
class Ratio:
    """A row of the tables of ratios: two steps, and the targets for bf16 and TF32, for all sizes or one."""

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
    Ratio("captured exact per-instance / captured SAM", f"{OURS} captured", "SAM captured", (1.12, 1.08)),
    Ratio("captured delta-SAM / *eager* ERM", "DeltaSAM-ambient captured", "ERM", (0.8, 1.0), "16 x 64"),
    Ratio("captured + compiled SAM / captured SAM", "SAM compiled+captured", "SAM captured", (0.75, 0.9)),
    Ratio("eager exact per-instance / eager SAM", OURS, "SAM", (1.5, 1.5)),
]
MEMORY = [
    Ratio(f"{name}, {way.strip() or 'eager'}, {scope}", step + way, f"SAM{way}", (1.4, 1.4), "32 x 128", memory=scope)
    for (name, step), way, scope in product(
        (("per-instance", OURS), ('per-instance, `factors="exact"`', f"{OURS}-exact")),
        (" captured", ""),
        ("total", "beyond weights and optimizer"),
    )
]


def marked(found: tuple[float, float | None] | None, target: float | None) -> str:
    """A ratio, its spread, and whether it keeps to the target when rounded to two digits."""
    if found is None:
        return "-"
    value, spread = found
    mark = "" if target is None else " ✓" if round(value, 2) <= target else " ✗"
    return f"{value:.2f}{'' if spread is None else f' ±{spread:.2f}'}{mark}"


def shape(record: Record) -> tuple[str, str, str]:
    """Model, size and precision."""
    options = record["options"]
    return options["model"], f"{options['batch']} x {options['length']}", options["precision"]


def ratios(results: Path, wanted: Sequence[Ratio]) -> str:
    """A row for every ratio, a column for every shape."""
    records = [record for part in STEPS for record in measured(results, part)]
    rows = []
    for figure in wanted:
        cells = []
        for place in SHAPES:
            found = next((v for r in records if shape(r) == place if (v := figure.of(r)) is not None), None)
            target = figure.targets[place[2] == "tf32"] if figure.size in (None, place[1]) else None
            cells.append(marked(found, target))
        aim = " / ".join(f"{target:g}" for target in dict.fromkeys(figure.targets))
        rows.append([figure.name, aim + (f" at {figure.size}" if figure.size else ""), *cells])
    head = [", ".join(place).replace("tf32", "TF32") for place in SHAPES]
    return table(["ratio", "at most (bf16 / TF32)", *head], rows)


def ms(name: str) -> Callable[[Record], str]:
    """The median time of a step."""
    return lambda r: "-" if (row := row_of(r, name)) is None else f"{row['seconds']['median'] * 1e3:.1f}"


def times(above: str, below: str) -> Callable[[Record], str]:
    """The ratio of two steps."""
    return lambda r: "-" if (found := ratio(r, above, below)) is None else f"{found[0]:.2f}"


def by_measurement(records: Sequence[Record], columns: Columns) -> str:
    """A row for every measurement."""
    return table(list(columns), [[cell(record) for cell in columns.values()] for record in records])


AXES: dict[str, tuple[str, dict[str, Any], Callable[[Record], float]]] = {
    "instances": ("instances N", {"model": "bert-base", "length": 64}, lambda r: r["options"]["batch"]),
    "tokens": ("tokens T", {"model": "bert-base", "batch": 16}, lambda r: r["options"]["length"]),
    "parameters": (
        "million parameters",
        {"batch": 16, "length": 64},
        lambda r: int(r["machine"]["parameters"]) / 1e6,
    ),
}
"""Name -> heading, the options that the measurements share, the place of a measurement."""
GROWTH: Columns = {
    "SAM, ms": ms("SAM captured"),
    "delta-SAM / SAM": times("DeltaSAM-ambient captured", "SAM captured"),
    "per-instance / SAM": times(f"{OURS} captured", "SAM captured"),
    "eager: delta-SAM / SAM": times("DeltaSAM-ambient", "SAM"),
    "eager: per-instance / SAM": times(OURS, "SAM"),
    "memory: per-instance / SAM": lambda r: f"{memory_ratio(r, f'{OURS} captured', 'SAM captured', total=True):.2f}",
    "low rank + full matrix": lambda r: f"{r['engine']['low-rank']} + {r['engine']['materialised']}",
}
LOOP: Columns = {
    "": lambda r: ", ".join(shape(r)),
    "loop, ms": ms(SLOW),
    "engine, ms": ms(OURS),
    "engine captured, ms": ms(f"{OURS} captured"),
    "SAM, ms": ms("SAM"),
    "loop / engine": times(SLOW, OURS),
    "loop / captured": times(SLOW, f"{OURS} captured"),
    "loop / SAM": times(SLOW, "SAM"),
}
CPU_TARGETS = {"bert-4x256": 1.25, "bert-2x768": 1.05}
CPU: Columns = {
    "": lambda r: ", ".join(shape(r)),
    "SAM, ms": ms("SAM"),
    "engine, ms": ms(OURS),
    "loop, ms": ms(SLOW),
    "engine / SAM": lambda r: marked(ratio(r, OURS, "SAM"), CPU_TARGETS[r["options"]["model"]]),
    "at most": lambda r: f"{CPU_TARGETS[r['options']['model']]}",
    "loop / engine": times(SLOW, OURS),
}


def on_axis(results: Path, axis: str) -> list[Record]:
    """The measurements of an axis, in order."""
    _, shared, place = AXES[axis]
    records = [r for r in measured(results, "growth") if {name: r["options"][name] for name in shared} == shared]
    return sorted(records, key=place)


def growth(results: Path, axis: str) -> str:
    """How time and memory grow along an axis."""
    heading, _, place = AXES[axis]
    return by_measurement(on_axis(results, axis), {heading: lambda r: f"{place(r):.0f}", **GROWTH})


def steps(results: Path) -> str:
    """Every step of every measurement behind the ratios."""
    rows = []
    for part, record in [(each, found) for each in STEPS for found in measured(results, each)]:
        for row in record["rows"]:
            seconds, peak = row["seconds"], row.get("peak_bytes")
            rows.append([
                part, *shape(record), row["name"], f"{seconds['median'] * 1e3:.1f}",
                f"{(seconds['high'] - seconds['low']) / 2 * 1e3:.1f}", f"{row['times_erm']['median']:.2f}",
                f"{row['times_sam']['median']:.2f}", f"{row['forwards']:g}/{row['backwards']:g}",
                "" if peak is None else f"{peak / 2**30:.2f}",
            ])  # fmt: skip
    head = ["part", "model", "size", "precision", "step", "ms", "±", "x eager ERM", "x eager SAM", "passes", "GiB"]
    return table(head, rows)


def provenance(results: Path) -> str:
    """The machine, the commits and the commands of every part."""
    rows = []
    for part in ("figures", "eager", "compiled", "growth", "loop", "cpu", "adamw"):
        records = measured(results, part)
        machines = {f"{r['machine']['device']}, torch {r['machine']['torch']}" for r in records}
        commits = {r["machine"]["commit"] for r in records}
        commands = {f"`PYTHONPATH=src {r['command']}`" for r in records}
        rows.append([part, "; ".join(sorted(machines)), ", ".join(sorted(commits)), "<br>".join(sorted(commands))])
    return table(["part", "machine", "commit", "command"], rows)


def trainings(results: Path) -> str:
    """Whole trainings; captured delta-SAM should take at most half of the time of eager SAM."""
    rows = []
    for row in [row for record in measured(results, "train") for row in record["rows"]]:
        target = 0.5 if row["name"] == "delta-sam captured" else None
        pace = statistics.median(run["seconds_per_update"] for run in row["runs"])
        passes = f"{row['runs'][0]['forwards']}/{row['runs'][0]['backwards']}"
        ratio_to_sam = marked((row["times_sam"]["median"], None), target)
        rows.append([row["name"], f"{row['seconds']['median']:.1f}", ratio_to_sam, f"{pace * 1e3:.1f}", passes])
    return table(["training", "seconds", "x eager SAM", "ms per update", "passes"], rows)


def adamw(results: Path) -> str:
    """The implementations of AdamW on a CPU."""
    rows = []
    for record, kind in product(measured(results, "adamw"), ("fused", "foreach", "for-loop")):
        names = [step + ("" if kind == "fused" else f", {kind} AdamW") for step in ("ERM", "SAM")]
        found = [ratio(record, name, name.partition(",")[0]) or (0.0, 0.0) for name in names]
        spread = [f"{value:.2f} ±{around:.2f}" for value, around in found]
        rows.append([shape(record)[1], kind, *(ms(name)(record) for name in names), *spread])
    return table(["size", "AdamW", "ERM, ms", "SAM, ms", "ERM / fused", "SAM / fused"], rows)
