"""The measurements of delta-SAM's weights, by model: those of weights_run.py, or older ones of more models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltasam.lab.report import read_runs

NEW, OLD = "instance-weights", "weights"

Lines = dict[tuple[str, ...], dict[str, list[Any]]]
"""The values of the batches by estimator and condition, or by method; None where there is no number."""


@dataclass(frozen=True)
class Point:
    """A model that the weights were measured on.

    Attributes:
        method: What it was trained with.
        updates: How long.
        accuracy: On the development set, in points.
        weights: Quality of the weights.
        alignment: Cosines of the updates.
        about: How it was measured; empty for older ones.
    """

    method: str
    updates: int
    accuracy: float
    weights: Lines = field(default_factory=dict)
    alignment: Lines = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Heading of its column."""
        return f"{self.updates} updates" if self.method == "ERM" else f"{self.method}, {self.updates} updates"

    @property
    def batches(self) -> int:
        """On how many it was measured."""
        return max(len(v) for part in (self.weights, self.alignment) for line in part.values() for v in line.values())

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Puts the lines of a measurement where they belong."""
        for line in lines:
            if "condition" in line:
                self.weights.setdefault((line["weighting"], line["condition"]), line["by_batch"])
            else:
                self.alignment.setdefault((line["method"],), line["by_batch"])


def points(results: Path) -> list[Point]:
    """The models in the order of their training, plain training first."""
    return _both(results)[0]


def further_points(results: Path) -> list[Point]:
    """Models that were measured on more rows, and are too few yet to stand for the others."""
    return _both(results)[1]


def _both(results: Path) -> tuple[list[Point], list[Point]]:
    new, old = measured_in(results / NEW), _sorted(_old(results / OLD))
    return (new, []) if len(new) >= len(old) else (old, new)


def _sorted(found: Sequence[Point]) -> list[Point]:
    return sorted(found, key=lambda point: (point.method != "ERM", point.updates))


def measured_in(folder: Path) -> list[Point]:
    """The models of one run of weights_run.py."""
    found = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        point = Point(record["method"], record["updates"], 100 * record["value"], about=record)
        for measurement in record["measurements"].values():
            point.add(measurement["lines"])
        found.append(point)
    return _sorted(found)


def _old(folder: Path) -> list[Point]:
    """Files of ``deltasam analyze ... --json``; every line of them names its run."""
    runs = {run.path.name: run for run in read_runs(folder).finished}
    found: dict[str, Point] = {}
    for path in sorted(folder.glob("*.json")):
        lines = json.loads(path.read_text(encoding="utf-8"))
        run = runs[lines[0]["run"]]
        point = Point(run.method, run.steps, 100 * run.metrics[run.primary])
        found.setdefault(run.path.name, point).add(lines)
    return list(found.values())
