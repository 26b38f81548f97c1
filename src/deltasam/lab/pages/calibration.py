"""Calibration on clean data: NLL, Brier score and ECE, before and after temperature scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context

from deltasam.lab.pages.curves import ends
from deltasam.lab.pages.effects import NO_RUNS, arms_of, counted, effect_table, missing, noted, setup_table, shown
from deltasam.lab.pages.evidence import PLAIN, arm_name, clean, of_arm, paired, topic, values
from deltasam.lab.pages.figures import BLUE, GREY, STYLE, forest, panels, svg
from deltasam.lab.pages.plan import cells
from deltasam.lab.pages.statistics import table

METRICS = {"score": "metric", "nll": "NLL x 100", "brier": "Brier x 100", "ece": "ECE x 100",
           "nll_scaled": "NLL x 100, scaled", "brier_scaled": "Brier x 100, scaled",
           "ece_scaled": "ECE x 100, scaled"}  # fmt: skip
_PAIRS = [
    (arm_name(first), arm_name(second))
    for first, second in (
        ("PerInstanceSAM", "SAM"), ("DeltaSAM", "SAM"), ("DeltaSAM", "DeltaSAM(RandomWeights)"),
        ("SAM", "ERM+LabelSmoothing"), ("SAM", "ERM+RDrop"),
    )
]  # fmt: skip
"""A method, and one that it refines or competes with; chosen after the differences to plain training were known."""
_PANELS = {"ece": "ECE", "ece_scaled": "ECE, after temperature scaling", "nll": "NLL",
           "nll_scaled": "NLL, after temperature scaling"}  # fmt: skip


def runs(results: Path) -> pd.DataFrame:
    """The clean runs of the comparison on encoders."""
    return clean(topic(results, "pays"))


def planned(results: Path) -> pd.DataFrame:
    """The planned clean runs."""
    return clean(cells(results, "pays"))


def differences(results: Path) -> str:
    """Arms by metrics, over all tasks and encoders: difference to plain training, paired by seed."""
    return noted(effect_table(runs(results), METRICS), missing(planned(results)))


def pairs(results: Path) -> str:
    """The differences between methods that compete, on clean data."""
    return pair_table(runs(results))


def pair_table(frame: pd.DataFrame) -> str:
    """The differences between the methods of :data:`_PAIRS`, over the setups that both have, paired by seed."""
    if frame.empty:
        return NO_RUNS
    cells = [[shown(paired(of_arm(frame, a), of_arm(frame, b), metric)) for metric in METRICS] for a, b in _PAIRS]
    return table(
        ["difference", *METRICS.values()], [[f"{a} - {b}", *row] for (a, b), row in zip(_PAIRS, cells, strict=True)]
    )


def by_setup(results: Path, metric: str) -> str:
    """Arms by setups: one metric."""
    return setup_table(runs(results), metric, planned(results)["setup"].unique())


def by_setup_differences(results: Path, metric: str) -> str:
    """Arms by setups: the difference of one metric to plain training."""
    return setup_table(runs(results), metric, planned(results)["setup"].unique(), to=PLAIN)


def dots(results: Path) -> str:
    """How far each arm is below plain training; to the right is better. An arm says on how many setups it rests."""
    frame = runs(results)
    base = of_arm(frame, PLAIN)
    every = len(counted(values(base, "nll")))
    parts: dict[str, dict[str, Any]] = {title: {} for title in _PANELS.values()}
    for arm in [arm for arm in arms_of(frame) if arm != PLAIN]:
        own = of_arm(frame, arm)
        count = len(counted(paired(base, own, "nll")))
        name = arm if count == every else f"{arm} ({count} of {every})"
        for metric, title in _PANELS.items():
            if found := paired(base, own, metric):
                parts[title][name] = ends(found)
    return forest(parts, "reduction against plain training, x 100", share_rows=True)


@rc_context(STYLE)
def reliability(results: Path, second: str = "SAM") -> str:
    """Accuracy against confidence, plain training and another arm: bins summed over the runs that both have."""
    frame = runs(results)
    frame = frame[frame["reliability"].map(lambda found: bool(found.get("evaluation"))).astype(bool)]
    bins_of = {arm: of_arm(frame, arm).set_index(["setup", "seed"])["reliability"] for arm in (PLAIN, second)}
    shared = bins_of[PLAIN].index.intersection(bins_of[second].index)
    (left, right), drawn = panels(2, (8.4, 3.8)), {}
    for each, name, heading in ((left, "evaluation", "as trained"), (right, "scaled", "after temperature scaling")):
        each.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
        for arm, colour, marker in ((PLAIN, GREY, "o"), (second, BLUE, "s")):
            bins = [found[name] for found in bins_of[arm].loc[shared] if found.get(name)]
            if bins:
                points = drawn[f"{arm} {name}"] = summed(bins)
                confidence, accuracy = zip(*[point[1:] for point in points], strict=True)
                label = "plain training" if arm == PLAIN else arm
                each.plot(confidence, accuracy, color=colour, marker=marker, markersize=4, label=label)
        if not len(shared):
            each.text(0.5, 0.6, NO_RUNS, ha="center")
        low = min([0.5, *(value for points in drawn.values() for point in points for value in point[1:])]) - 0.02
        each.set(title=heading, xlabel="confidence", ylabel="accuracy", xlim=(low, 1.01), ylim=(low, 1.01))
    if len(shared):
        left.legend(frameon=False, loc="upper left")
    return svg(left.figure, drawn)


def summed(runs: list[list[list[float | None]]]) -> list[tuple[float, float, float]]:
    """Count, mean confidence and accuracy of each bin over several runs; empty bins are left out."""
    bins = np.asarray([[[value or 0.0 for value in each] for each in run] for run in runs], dtype=np.float64)
    counts = bins[..., 0].sum(axis=0)
    sums = (bins[..., 1:] * bins[..., :1]).sum(axis=0)
    return [
        (float(n), float(confidence / n), float(accuracy / n))
        for n, (confidence, accuracy) in zip(counts, sums, strict=True)
        if n
    ]
