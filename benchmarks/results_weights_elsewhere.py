"""The section of docs/results.md on delta-SAM's weights on another task and another encoder (weights_run.py)."""

from __future__ import annotations

import runpy
from pathlib import Path

HERE = Path(__file__).parent
weights = runpy.run_path(str(HERE / "results_weights.py"))
measured = runpy.run_path(str(HERE / "weights_points.py"))["measured_in"]
table, over_points, two_digits = (weights[name] for name in ("table", "over_points", "two_digits"))

PLACES = {
    "cola": ("the same encoder on CoLA", "Matthews correlation times 100"),
    "minilm": ("the second encoder, all-MiniLM-L6-v2, on MRPC", "accuracy"),
}
"""Ending of the folder -> what was measured, and the metric of its models."""

ABOUT = """#### {what}

Plain training; {metric} {accuracy} updates. {rows} training rows in {batches} batches of {size}, rho = 0.05,
eta = 1e-4, torch {torch}, commit {commit}, on a CPU.

    {command}

Rank correlation of g with the same estimator in float64, without dropout, along the same direction:"""


def elsewhere_section(results: Path) -> str:
    """Do the weights repeat, are they the theory's, and where do the updates point: for each place that there is."""
    blocks = []
    for ending, (what, metric) in PLACES.items():
        found = measured(results / f"instance-weights-{ending}")
        if not found:
            continue
        names = [point.name for point in found]
        quality, cosines = ({p.name: getattr(p, part) for p in found} for part in ("weights", "alignment"))
        facts = {**found[0].about, **weights["facts_of"](found), "metric": metric}
        blocks += [
            ABOUT.format(what=what[0].upper() + what[1:], **facts),
            table(["estimator", "changed", *names], over_points(quality, "spearman", two_digits)),
            weights["IDEAL"].replace("Rank correlation of g with", "Rank correlation with"),
            table(["estimator", "computed in", *names], over_points(quality, "ideal", two_digits)),
            weights["ALIGNMENT"],
            table(["method", *names], weights["both_cosines"](cosines)),
            weights["differences_table"](cosines),
        ]
    return "\n\n".join(["### Another task, another encoder", *blocks]) if blocks else ""
