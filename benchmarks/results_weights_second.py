"""The section of docs/results.md on delta-SAM's weights on a second task, from the measurements of weights_run.py."""

from __future__ import annotations

import runpy
from pathlib import Path

HERE = Path(__file__).parent
weights = runpy.run_path(str(HERE / "results_weights.py"))
folded = runpy.run_path(str(HERE / "results_common.py"))["folded"]
measured = runpy.run_path(str(HERE / "weights_points.py"))["measured_in"]
table, over_points, two_digits = (weights[name] for name in ("table", "over_points", "two_digits"))

ABOUT = """### The same on CoLA

The task on which delta-SAM helps (below). The same encoder and kind of path; Matthews correlation {accuracy} updates.
{rows} training rows in {batches} batches of {size}, rho = 0.05, eta = 1e-4, torch {torch}, commit {commit}, on a CPU.

    {command}"""

REPEAT = "Rank correlation of g with the same estimator in float64, without dropout, along the same direction:"


def second_task_section(results: Path) -> str:
    """Do the weights repeat, are they the theory's, and where do the updates point; nothing where it was not run."""
    found = measured(results / "instance-weights-cola")
    if not found:
        return ""
    names = [point.name for point in found]
    quality, cosines = ({p.name: getattr(p, part) for p in found} for part in ("weights", "alignment"))
    return "\n\n".join([
        ABOUT.format(**{**found[0].about, **weights["facts_of"](found)}),
        weights["ALIGNMENT"],
        table(["method", *names], weights["both_cosines"](cosines)),
        folded("Differences of the cosines", weights["differences_table"](cosines)),
        folded(
            "Do the weights repeat, and are they what the theory asks for?",
            REPEAT,
            table(["estimator", "changed", *names], over_points(quality, "spearman", two_digits)),
            weights["IDEAL"].replace("Rank correlation of g with", "Rank correlation with"),
            table(["estimator", "computed in", *names], over_points(quality, "ideal", two_digits)),
        ),
    ])  # fmt: skip
