"""The section of docs/results.md that takes all tasks of GLUE together: small effects of the same sign add up."""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from deltasam.lab.report import Run, holm, method_name, pooled_test

HERE = Path(__file__).parent
glue = runpy.run_path(str(HERE / "results_glue.py"))
chosen = runpy.run_path(str(HERE / "results_chosen.py"))["chosen"]
forest = runpy.run_path(str(HERE / "forest_plot.py"))["forest"]
table, primary, TASKS = (glue[name] for name in ("table", "primary", "TASKS"))

DIRECTIONAL, OWN, LOSS, SHUFFLED = (
    f"DeltaSAM({name})" for name in ("Directional", "OwnGradient", "LossWeights", "RandomWeights")
)
PAIRS = [
    ("ERM+RDrop", "ERM"), ("FreeLB", "ERM"), ("ERM+SMART", "ERM"), ("ERM+R3F", "ERM"),
    ("SAM", "ERM"), ("DeltaSAM", "ERM"), ("PerInstanceSAM", "ERM"),
    ("DeltaSAM", "SAM"), (DIRECTIONAL, "SAM"), (OWN, "SAM"), (LOSS, "SAM"), (SHUFFLED, "SAM"),
    ("PerInstanceSAM", "SAM"),
    (LOSS, "DeltaSAM"), (SHUFFLED, "DeltaSAM"),
]  # fmt: skip
RESAMPLES = 20_000

ABOUT = """Every task counts the same, whatever its number of seeds: the mean over the tasks of the mean
difference, paired by seed. The intervals are of bootstrap samples of the seeds within each task, the p-values of
permutation tests that exchange the methods seed by seed within each task, after Holm's correction over a column.
The tasks are fixed: this says what to expect of other seeds, not of other tasks. That CoLA stands apart was decided
after its results were seen."""

CHOSEN = """The table above has one radius for the larger tasks. Here they have the one that they chose themselves, as
the small ones do, and FreeLB its step."""

SECOND = "At radii not tuned for it, as in its tables above."

BOTH = """Every task of either encoder counts the same, at the radii of the two tables without a choice on the task. To
take them together was decided after the results were seen."""

Cells = Mapping[str, Mapping[str, Sequence[Run]]]
"""Task -> method -> runs of the final weights, by seed."""

Differences = dict[str, list[float]]
"""Task -> differences by seed."""


def pooled_section(results: Path) -> str:
    """The first encoder, at the radius of the tables above and where every task chose its own; the second; both."""
    found = compared(first_encoder(results))
    if not found:
        return ""
    parts = ["## GLUE, all tasks together", ABOUT, glue["picture"]("pooled.svg"), as_table(found)]
    for heading, about, cells in (
        ("### With the radius chosen on every task", CHOSEN, all_chosen(results)),
        ("### All tasks of the second encoder", SECOND, second_encoder(results)),
        ("### Both encoders together", BOTH, both_encoders(results)),
    ):
        also = compared(cells)
        parts += [heading, about, as_table(also)] if also else []
    return "\n\n".join(parts)


def as_table(found: Mapping[str, Differences]) -> str:
    """A row for every pair of methods: over all tasks that both have, and over all but CoLA."""
    columns = [column(list(found.values())), column([without(at, "cola") for at in found.values()])]
    rows = [
        [pair, str(len(at)), every, others, better(at)]
        for (pair, at), every, others in zip(found.items(), *columns, strict=True)
    ]
    return str(table(["difference", "tasks", "all of them", "without CoLA", "first is better on"], rows))


def first_encoder(results: Path) -> Cells:
    """The small tasks at the radius chosen there, the larger ones at one radius."""
    return {**glue["small_cells"](results), **glue["larger_cells"](results)}


def second_encoder(results: Path) -> Cells:
    """All tasks there are of the second encoder, at one radius."""
    return {**glue["second_encoder_cells"](results), **glue["second_larger_cells"](results)}


def both_encoders(results: Path) -> Cells:
    """The tasks of the first encoder and those of the second, by names of their own; nothing without the second."""
    second = {f"{task}, second encoder": at for task, at in second_encoder(results).items()}
    return {**first_encoder(results), **second} if second else {}


def all_chosen(results: Path) -> Cells:
    """The methods whose radius was chosen on the larger tasks, too, and plain training; nothing before it was."""
    _, larger = chosen(results / "glue-larger")
    methods = {method for at in larger.values() for method in at}
    small = {
        task: {m: runs for m, runs in at.items() if m in methods} for task, at in glue["small_cells"](results).items()
    }
    return {**small, **larger} if larger else {}


def plots(results: Path) -> dict[str, str]:
    """File name -> the same as a picture."""
    found = compared(first_encoder(results))
    if not found:
        return {}
    panels = {
        "all tasks": {pair: mean_and_ends(at) for pair, at in found.items()},
        "without CoLA": {pair: mean_and_ends(without(at, "cola")) for pair, at in found.items()},
    }
    return {"pooled.svg": forest(panels, x="points")}


def compared(cells: Cells) -> dict[str, Differences]:
    """The pairs of methods that have two tasks or more in common, CoLA apart."""
    found = {
        f"{method_name(first)} - {method_name(second)}": differences(cells, first, second) for first, second in PAIRS
    }
    return {pair: at for pair, at in found.items() if len(without(at, "cola")) > 1}


def differences(cells: Cells, first: str, second: str) -> Differences:
    """By the seeds that both have."""
    found = {}
    for task, methods in cells.items():
        theirs = {run.seed: primary(run) for run in methods.get(second, [])}
        both = [primary(run) - theirs[run.seed] for run in methods.get(first, []) if run.seed in theirs]
        if both:
            found[task] = both
    return found


def without(at: Differences, task: str) -> Differences:
    """All others, of whichever encoder."""
    return {name: values for name, values in at.items() if name.partition(",")[0] != task}


def column(found: Sequence[Differences]) -> list[str]:
    """Mean, interval and p of each row."""
    tests = [pooled_test({task: (values, [0.0] * len(values)) for task, values in at.items()}) for at in found]
    adjusted = holm([test.p for test in tests])
    return [
        "{:.2f} [{:.2f}, {:.2f}] (p = {:.2g})".format(*mean_and_ends(at), p)
        for at, p in zip(found, adjusted, strict=True)
    ]


def mean_and_ends(at: Differences) -> tuple[float, float, float]:
    """Mean over the tasks with its 95% interval, by drawing seeds again within each task."""
    random = np.random.default_rng(0)
    means = np.mean([
        random.choice(np.asarray(values), size=(RESAMPLES, len(values))).mean(axis=1) for values in at.values()
    ], axis=0)  # fmt: skip
    low, high = np.quantile(means, (0.025, 0.975))
    return float(np.mean([np.mean(values) for values in at.values()])), float(low), float(high)


def better(at: Differences) -> str:
    """On how many tasks, by the mean."""
    return f"{sum(sum(values) > 0 for values in at.values())} of {len(at)}"
