"""Ratios of steps and of memory, with their targets: a row for every ratio, a column for every shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from deltasam.lab.pages.speed import DELTA, OURS, Record, marked, measured, memory_ratio, ratio, shape
from deltasam.lab.pages.statistics import table

STEPS = ("eager", "figures", "compiled")  # the parts behind the ratios; the first that has a ratio counts
Place = tuple[str, str, str]
"""Model, size, precision."""
SHAPES: list[Place] = list(product(("bert-base", "roberta-large"), ("16 x 64", "32 x 128"), ("bf16", "tf32")))
LONG_SHAPES: list[Place] = [
    *product(("bert-base",), ("8 x 512", "4 x 1024"), ("bf16", "tf32")),
    *product(("bert-base",), ("16 x 512", "16 x 1024"), ("bf16",)),
]
CAPTURED_INSTANCE = "captured exact per-instance / captured SAM"


@dataclass(frozen=True)
class Ratio:
    """A row of the tables of ratios: two steps, and the targets for bf16 and TF32, for all sizes or one."""

    name: str
    above: str
    below: str
    targets: tuple[float, float] | None = None
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

    def at(self, records: Sequence[Record], place: Place) -> tuple[float, float | None] | None:
        """The ratio of the first measurement of a shape that has it."""
        return next((found for r in records if shape(r) == place if (found := self.of(r)) is not None), None)

    def target(self, place: Place) -> float | None:
        """The target for a shape, if there is one."""
        return self.targets[place[2] == "tf32"] if self.targets and self.size in (None, place[1]) else None


def _memory(name: str, step: str, way: str, scope: str, targets: tuple[float, float] | None) -> Ratio:
    return Ratio(f"{name}, {way.strip() or 'eager'}, {scope}", step + way, f"SAM{way}", targets, "32 x 128",
                 memory=scope)  # fmt: skip


RATIOS = [
    Ratio("eager exact per-instance / eager SAM", OURS, "SAM", (1.15, 1.15)),
    Ratio(CAPTURED_INSTANCE, f"{OURS} captured", "SAM captured", (1.0, 1.0)),
    Ratio("captured SAM / (2 x captured ERM)", "SAM captured", "ERM captured", (1.03, 1.03), times=2),
    Ratio("captured delta-SAM / captured SAM", f"{DELTA} captured", "SAM captured", (1.2, 1.2)),
    Ratio("the same with probes in float32, the default", "DeltaSAM captured", "SAM captured"),
    Ratio("the same with `probe_every=4`", "DeltaSAM-every-4 captured", "SAM captured", (1.12, 1.12)),
    Ratio("captured delta-SAM / *eager* ERM", f"{DELTA} captured", "ERM", (0.8, 1.0), "16 x 64"),
    Ratio("compiled SAM / compiled ERM", "SAM compiled", "ERM compiled", (2.05, 2.05)),
    Ratio("the same, SAM written by hand, without any check", "SAM by hand compiled", "ERM compiled"),
    Ratio("compiled delta-SAM / compiled ERM", f"{DELTA} compiled", "ERM compiled", (2.7, 2.7)),
    Ratio("compiled exact per-instance / compiled SAM", f"{OURS} compiled", "SAM compiled"),
    Ratio("captured + compiled SAM / captured SAM", "SAM compiled+captured", "SAM captured", (0.75, 0.9)),
    Ratio("captured + compiled exact per-instance / captured + compiled SAM", f"{OURS} compiled+captured",
          "SAM compiled+captured", (1.1, 1.1)),
]  # fmt: skip
MEMORY = [
    _memory(name, step, way, scope, targets)
    for (name, step), way, (scope, targets) in product(
        (("per-instance", OURS), ('per-instance, `factors="exact"`', f"{OURS}-exact")),
        (" captured", ""),
        (("total", (1.4, 1.4)), ("beyond weights and optimizer", (1.25, 1.35))),
    )
]
LONG = [
    Ratio(CAPTURED_INSTANCE, f"{OURS} captured", "SAM captured", (1.1, 1.1)),
    Ratio("eager exact per-instance / eager SAM", OURS, "SAM"),
    Ratio("captured SAM / (2 x captured ERM)", "SAM captured", "ERM captured", times=2),
    Ratio("memory: captured per-instance / SAM, total", f"{OURS} captured", "SAM captured", memory="total"),
    Ratio("the same beyond weights and optimizer", f"{OURS} captured", "SAM captured", memory="beyond"),
]


def records_of(results: Path, parts: Sequence[str] = STEPS) -> list[Record]:
    """The measurements of several parts, in the order of the parts."""
    return [record for part in parts for record in measured(results, part)]


def ratios(
    results: Path, wanted: Sequence[Ratio], parts: Sequence[str] = STEPS, places: Sequence[Place] = tuple(SHAPES)
) -> str:
    """A row for every ratio, a column for every shape."""
    records = records_of(results, parts)
    rows = []
    for figure in wanted:
        cells = [marked(figure.at(records, place), figure.target(place)) for place in places]
        aim = " / ".join(f"{target:.4g}" for target in dict.fromkeys(figure.targets or ()))
        rows.append([figure.name, aim + (f" at {figure.size}" if aim and figure.size else ""), *cells])
    head = [", ".join(place).replace("tf32", "TF32") for place in places]
    return table(["ratio", "at most (bf16 / TF32)", *head], rows)


def long_texts(results: Path) -> str:
    """The ratios at 512 and 1,024 tokens."""
    return ratios(results, LONG, ("long", "growth"), LONG_SHAPES)
