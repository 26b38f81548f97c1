"""What the sections of docs/results.md share: intervals, paired differences, the choice on training data."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltasam.lab.report import Comparison, Run, holm, method_name, method_order, paired_test, summarize

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
MODEL = "bert-small-wiki"
weights = runpy.run_path(str(Path(__file__).with_name("results_weights.py")))
table, with_interval = weights["table"], weights["with_interval"]
TASKS = {"mrpc": "MRPC", "rte": "RTE", "stsb": "STS-B", "cola": "CoLA", "qnli": "QNLI", "mnli": "MNLI", "qqp": "QQP",
         "sst2": "SST-2"}  # fmt: skip

Measure = Callable[[Run], float]
Point = tuple[tuple[str, float], ...]

HOLM = "p after Holm's correction over the comparisons of a column that have the same second method."
"""The families of the tests: one question each, so that a row more in one table does not weaken another."""


def primary(run: Run) -> float:
    """The primary metric in points."""
    return 100 * run.metrics[run.primary]


def mean(runs: Iterable[Run]) -> float:
    """Mean of the primary metric in points."""
    return summarize([primary(run) for run in runs]).mean


def result(run: Run) -> dict[str, Any]:
    """The whole result.json of a run."""
    found: dict[str, Any] = json.loads((run.path / "result.json").read_bytes())
    return found


def config(run: Run) -> dict[str, Any]:
    """The configuration of a run, as resolved."""
    found: dict[str, Any] = result(run)["config"]
    return found


def shown(name: str) -> str:
    """The method as people write it, with what is special about a row behind a comma."""
    method, comma, special = name.partition(", ")
    return method_name(method) + comma + special


def once(runs: Iterable[Run]) -> list[Run]:
    """Repetitions of one configuration, in the order of their seeds.

    Of several configurations the one with the most seeds, never the one with the best result.
    """
    variants: dict[int, dict[int, Run]] = {}
    for run in runs:
        variants.setdefault(run.variant, {})[run.seed] = run
    most = max(variants.values(), key=len, default={})
    return [most[seed] for seed in sorted(most)]


def order(method: str) -> tuple[int, str]:
    """As the paper lists them, delta-SAM's other weights behind it."""
    kind = method.partition("(")[0]
    return (method_order(kind)[0], method)


def chosen_points(tuning: Iterable[Run]) -> dict[tuple[str, str], Point]:
    """Settings of every (task, method) with the best mean over the tuning seeds: the choice of ``deltasam sweep``."""
    cells: dict[tuple[str, str], dict[Point, list[Run]]] = {}
    for run in tuning:
        cells.setdefault((run.task, run.method), {}).setdefault(run.settings, []).append(run)
    found = {}
    for key, points in cells.items():
        most = max(map(len, points.values()))
        whole = [point for point in sorted(points) if len(points[point]) == most]
        found[key] = max(whole, key=lambda point: mean(points[point]))
    return found


def folded(summary: str, *blocks: str) -> str:
    """Behind a line to open: long tables that support a text, or nothing where the first one is empty."""
    if not blocks[0]:
        return ""
    return "\n\n".join([f"<details><summary>{summary}</summary>", *blocks, "</details>"])


def compared(first: Sequence[Run], second: Sequence[Run], measure: Measure) -> tuple[Comparison, str] | None:
    """The paired test over common seeds, and the mean difference with its interval; None without common seeds."""
    ours, theirs = ({run.seed: measure(run) for run in runs} for runs in (first, second))
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        return None
    difference = with_interval([ours[seed] - theirs[seed] for seed in seeds], 2)
    return paired_test([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]), difference


def difference_table(
    columns: Mapping[str, tuple[Mapping[str, Sequence[Run]], Measure]], pairs: Sequence[tuple[str, str]]
) -> str:
    """A row for every pair of methods, a column for every task or measure: the difference, its interval, p.

    Args:
        columns: The heading of each column, with the runs of each method and what is measured.
        pairs: First and second method; those without runs in any column are left out.

    Returns:
        The table, nothing where no pair has been run.
    """
    texts: dict[tuple[str, str], dict[str, str]] = {}
    for heading, (methods, measure) in columns.items():
        for second in dict.fromkeys(second for _, second in pairs):
            family = {
                (first, second): found
                for first, other in pairs
                if other == second and first in methods and second in methods
                if (found := compared(methods[first], methods[second], measure)) is not None
            }
            adjusted = holm([comparison.p for comparison, _ in family.values()])
            for (pair, (comparison, text)), p in zip(family.items(), adjusted, strict=True):
                texts.setdefault(pair, {})[heading] = f"{text} (n = {comparison.pairs}, p = {p:.2g})"
    rows = [
        [f"{shown(pair[0])} - {shown(pair[1])}", *(texts[pair].get(heading, "-") for heading in columns)]
        for pair in pairs
        if pair in texts
    ]
    return table(["difference", *columns], rows) if rows else ""
