"""Development sets of other domains: the metric, NLL and ECE there, against plain training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from deltasam.lab.pages.effects import ARMS, NO_RUNS, effect_table, missing, noted
from deltasam.lab.pages.evidence import clean, topic
from deltasam.lab.pages.plan import cells

_NAMES = {"score": "metric", "nll": "NLL x 100", "ece": "ECE x 100"}


def runs(results: Path) -> pd.DataFrame:
    """The runs with other evaluation sets; ``score_shifted`` and so on are means over the other sets of a run.

    The mean is taken run by run: a seed is one draw, however many sets it is evaluated on.
    """
    frame = clean(topic(results, "shift"))
    for metric in _NAMES:
        columns = [f"{metric}_on_{name}" for name in sets(frame) if f"{metric}_on_{name}" in frame]
        frame = frame.assign(**{f"{metric}_shifted": frame[columns].mean(axis=1) if columns else float("nan")})
    return frame


def sets(frame: pd.DataFrame) -> list[str]:
    """The names of the other sets."""
    return [str(column).removeprefix("score_on_") for column in frame if str(column).startswith("score_on_")]


def overall(results: Path) -> str:
    """Arms by metrics: in the domain, and the mean over the other sets."""
    metrics = {"score": "metric, own domain", **{f"{key}_shifted": f"{name}, others" for key, name in _NAMES.items()}}
    frame = runs(results)
    return noted(effect_table(frame, metrics, ARMS[:1]), missing(cells(results, "shift")))


def by_set(results: Path) -> str:
    """One table for each metric: arms by pairs of training task and other set, over the models."""
    frame = runs(results)
    parts = [
        f"{heading}:\n\n{effect_table(part, names, ARMS[:1])}"
        for metric, heading in _NAMES.items()
        if (names := dict(_pairs(frame, metric))) and len(part := _by_pair(frame, metric))
    ]
    return "\n\n".join(parts) or NO_RUNS


def _pairs(frame: pd.DataFrame, metric: str) -> Iterator[tuple[str, str]]:
    """Column and heading of every pair of training task and other set that has values."""
    for name in sets(frame):
        known = frame[frame[f"{metric}_on_{name}"].notna()] if f"{metric}_on_{name}" in frame else frame[:0]
        for task in known["task"].unique():
            yield f"{task} to {name}", f"{task} to {name}"


def _by_pair(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A column of the metric for every pair."""
    for name in sets(frame):
        if f"{metric}_on_{name}" in frame:
            for task in frame["task"].unique():
                values = frame[f"{metric}_on_{name}"].where(frame["task"] == task)
                frame = frame.assign(**{f"{task} to {name}": values})
    return frame
