"""How often the 95% intervals of docs/results.md contain the true mean, by simulation: with few seeds, less often.

Scores are drawn from a normal distribution with mean 0, and the share of intervals that contain 0 is counted: for a
cell of a table (BCa bootstrap), and for the mean over several tasks (percentile bootstrap within each task).

    python benchmarks/interval_coverage.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from deltasam.lab.pages.statistics import stratified_interval
from deltasam.lab.report import bootstrap_interval

ROOT = Path(__file__).parents[1]
FILE = ROOT / "results" / "interval-coverage" / "normal.json"
REPETITIONS = 4000
SEEDS = (3, 5, 10)
TASKS = (4, 8)


def of_a_cell(seeds: int, repetitions: int, random: np.random.Generator) -> float:
    """The share of the intervals of so many scores that contain 0."""
    found = (bootstrap_interval(list(random.normal(size=seeds))) for _ in range(repetitions))
    return sum(low <= 0 <= high for low, high in found) / repetitions


def of_several_tasks(tasks: int, seeds: int, repetitions: int, random: np.random.Generator) -> float:
    """The same for the mean over tasks of equal spread."""
    hits = 0
    for _ in range(repetitions):
        _, low, high = stratified_interval({str(task): list(random.normal(size=seeds)) for task in range(tasks)})
        hits += low <= 0 <= high
    return hits / repetitions


def measured(repetitions: int = REPETITIONS) -> dict[str, object]:
    """All of it, from a fixed seed."""
    random = np.random.default_rng(0)
    return {
        "level": 0.95,
        "repetitions": repetitions,
        "cell": {str(seeds): of_a_cell(seeds, repetitions, random) for seeds in SEEDS},
        "tasks": {
            str(tasks): {str(seeds): of_several_tasks(tasks, seeds, repetitions, random) for seeds in SEEDS}
            for tasks in TASKS
        },
    }


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")
