"""Rounded weights on clean data: the metric at 8, 4 and 3 bits, and what rounding costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import pandas as pd

from deltasam.lab.pages.curves import Line, curves, ends
from deltasam.lab.pages.effects import NO_RUNS, arms_of, common_setups, effect_table, mean, missing, noted
from deltasam.lab.pages.evidence import clean, of_arm, topic, values
from deltasam.lab.pages.plan import cells
from deltasam.lab.pages.statistics import table

BITS = (8, 4, 3)
GROUPINGS = {"": "groups of 64", "_channel": "one scale per channel"}
_COLUMNS = {f"{bits}bit{suffix}": f"{bits} bits, {name}" for suffix, name in GROUPINGS.items() for bits in BITS}
DRAWN = ("ERM", "SAM", "δ-SAM", "per-instance SAM", "R-Drop")


def with_drops(frame: pd.DataFrame) -> pd.DataFrame:
    """Adds what rounding costs, ``drop_4bit`` and so on: the metric before minus after."""
    known = [suffix for suffix in _COLUMNS if f"score_{suffix}" in frame]
    return frame.assign(**{f"drop_{suffix}": frame["score"] - frame[f"score_{suffix}"] for suffix in known})


def runs(results: Path) -> pd.DataFrame:
    """The clean runs of the comparison on encoders."""
    return with_drops(clean(topic(results, "pays")))


def scores(results: Path) -> str:
    """Arms by roundings, for each encoder: the mean of the metric over its tasks."""
    columns = {"score": "not rounded", **{f"score_{suffix}": name for suffix, name in _COLUMNS.items()}}

    def one(frame: pd.DataFrame) -> str:
        means = {arm: [mean(values(of_arm(frame, arm), metric), 1) for metric in columns] for arm in arms_of(frame)}
        return table(["method", *columns.values()], [[arm, *found] for arm, found in means.items()])

    return noted(_by_encoder(runs(results), one), missing(clean(cells(results, "pays"))))


def drops(results: Path) -> str:
    """Arms by roundings, for each encoder: what rounding costs plain training, and the differences of the others."""
    metrics = {f"drop_{suffix}": name for suffix, name in _COLUMNS.items()}
    return _by_encoder(runs(results), lambda frame: effect_table(frame, metrics))


def _by_encoder(frame: pd.DataFrame, make: Callable[[pd.DataFrame], str]) -> str:
    """A table for each encoder: they differ in what rounding costs them, and in the arms that have runs."""
    parts = [f"{model}:\n\n{make(own)}" for model, own in frame.groupby("model")] if len(frame) else []
    return "\n\n".join(parts) or NO_RUNS


def calibration(results: Path) -> str:
    """Arms by roundings: NLL and ECE of the rounded models, difference to plain training."""
    names = {"nll": "NLL x 100", "ece": "ECE x 100"}
    metrics = {f"{key}_{bits}bit": f"{name}, {bits} bits" for key, name in names.items() for bits in BITS}
    return effect_table(runs(results), metrics)


def figure(results: Path) -> str:
    """The metric against the number of bits, by encoder and grouping, over the setups that all drawn arms have."""
    frame = runs(results)
    return draw({str(model): own for model, own in frame.groupby("model")} or {"": frame}, DRAWN)


def draw(frames: Mapping[str, pd.DataFrame], arms: Sequence[str]) -> str:
    """Bits against the metric, for some arms; a panel for each frame and grouping that was measured.

    A frame without a title is named by the tasks that are drawn.
    """
    parts: dict[str, dict[str, Line]] = {}
    for (title, frame), (suffix, name) in product(frames.items(), GROUPINGS.items()):
        metrics = {32.0: "score", **{float(bits): f"score_{bits}bit{suffix}" for bits in BITS}}
        known = {place: metric for place, metric in metrics.items() if metric in frame}
        if len(known) > 1:
            heading = title or ", ".join(
                setup.partition(",")[0] for setup in common_setups(_cells(frame, arms, known).values())
            )
            parts[f"{heading}, {name}"] = common_lines(frame, arms, known)
    parts = parts or {name: {} for name in GROUPINGS.values()}
    names = ["not rounded", *(f"{bits}" for bits in BITS)]
    places = (32.0, *map(float, BITS))
    return curves(parts, "bits of the weights", "metric, mean over the setups", names, places, share_rows=True)


def common_lines(frame: pd.DataFrame, arms: Sequence[str], metrics: Mapping[float, str]) -> dict[str, Line]:
    """Arm -> place -> mean with its interval, over the setups that all of the arms have at all places.

    Arms without any run are left out. With other setups for other arms, the lines could not be compared.
    """
    cells = _cells(frame, arms, metrics)
    shared = common_setups(cells.values())
    return {
        arm: {place: ends({setup: cells[arm, place][setup] for setup in shared}) for place in metrics}
        for arm in arms
        if shared and (arm, next(iter(metrics))) in cells
    }


def _cells(
    frame: pd.DataFrame, arms: Sequence[str], metrics: Mapping[float, str]
) -> dict[tuple[str, float], dict[str, list[float]]]:
    """Arm and place -> the metric by setup, for the arms that have runs at all places."""
    cells = {(arm, place): values(of_arm(frame, arm), metric) for arm in arms for place, metric in metrics.items()}
    present = {arm for arm in arms if all(cells[arm, place] for place in metrics)}
    return {key: cell for key, cell in cells.items() if key[0] in present}
