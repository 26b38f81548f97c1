"""The sections of docs/results.md on delta-SAM's weights on another task and encoder, from weights_run.py."""

from __future__ import annotations

import runpy
from pathlib import Path

HERE = Path(__file__).parent
weights = runpy.run_path(str(HERE / "results_weights.py"))
folded = runpy.run_path(str(HERE / "results_common.py"))["folded"]
measured = runpy.run_path(str(HERE / "weights_points.py"))["measured_in"]
table, over_points, two_digits = (weights[name] for name in ("table", "over_points", "two_digits"))

ABOUT = """### {heading}

{what}; Matthews correlation {accuracy} updates.
{rows} training rows in {batches} batches of {size}, rho = 0.05, eta = 1e-4, torch {torch}, commit {commit}, on a CPU.

    {command}"""

SMALL = "The task on which delta-SAM helps (below). The same encoder and kind of path"
BASE = """The same task on all-mpnet-base-v2 (12 layers, hidden 768, 109M parameters), the size of the paper's smaller
encoder; learning rate 3e-5"""

REPEAT = "Rank correlation of g with the same estimator in float64, without dropout, along the same direction:"


def second_task_section(results: Path) -> str:
    """The encoder of the other sections on CoLA; nothing where it was not run."""
    return section(results / "instance-weights-cola", "The same on CoLA", SMALL)


def base_section(results: Path) -> str:
    """An encoder of base size on CoLA; nothing where it was not run."""
    return section(results / "instance-weights-base", "The same on an encoder of base size", BASE)


def section(folder: Path, heading: str, what: str) -> str:
    """Do the weights repeat, are they the theory's, and where do the updates point."""
    found = measured(folder)
    if not found:
        return ""
    names = [point.name for point in found]
    quality, cosines = ({p.name: getattr(p, part) for p in found} for part in ("weights", "alignment"))
    return "\n\n".join([
        ABOUT.format(**{**found[0].about, **weights["facts_of"](found), "heading": heading, "what": what}),
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
