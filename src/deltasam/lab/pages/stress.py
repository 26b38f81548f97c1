"""Wrong labels and few rows: the metric, NLL and ECE of every arm by condition, against plain training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from deltasam.lab.pages.curves import Line, curves
from deltasam.lab.pages.effects import ENCODERS, NO_RUNS, arms_of, mean, missing, noted, setup_table, shown
from deltasam.lab.pages.evidence import PLAIN, of_arm, paired, setup_name, topic, values
from deltasam.lab.pages.plan import cells
from deltasam.lab.pages.rounding import DRAWN, common_lines
from deltasam.lab.pages.statistics import table
from deltasam.step.names import pluralized

NOISE = {0.0: "clean", 0.1: "10% wrong labels", 0.2: "20% wrong labels", 0.4: "40% wrong labels"}
ROWS = {0.0: "all rows", 1000.0: "1,000 rows", 250.0: "250 rows"}
AXES: Mapping[str, Mapping[float, str]] = {"noise": NOISE, "rows": ROWS}
_OTHER = {"noise": "rows", "rows": "noise"}


def at(results: Path, axis: str, level: float) -> pd.DataFrame:
    """The runs of one level of an axis, ``noise`` or ``rows``; the other axis is clean."""
    return _level(topic(results, "pays"), axis, level)


def _level(frame: pd.DataFrame, axis: str, level: float) -> pd.DataFrame:
    return frame[(frame[_OTHER[axis]] == 0) & (frame[axis] == level)]


def differences(results: Path, axis: str, metric: str) -> str:
    """Arms by levels, over all setups: plain training, and the differences of the others to it, paired by seed."""
    if topic(results, "pays").empty:
        return NO_RUNS
    levels, frames = AXES[axis], {level: at(results, axis, level) for level in AXES[axis]}
    plain = {level: of_arm(frame, PLAIN) for level, frame in frames.items()}
    rows = [[PLAIN, *(mean(values(plain[level], metric)) for level in levels)]]
    for arm in arms_of(pd.concat(frames.values())):
        if arm != PLAIN:
            found = {level: paired(of_arm(frames[level], arm), plain[level], metric) for level in levels}
            rows.append([arm, *(shown(found[level], len(values(plain[level], metric))) for level in levels)])
    counts = {level: pluralized(len(values(plain[level], metric)), "setup") for level in levels}
    return table([f"difference to {PLAIN}", *(f"{name} ({counts[level]})" for level, name in levels.items())], rows)


def gaps(results: Path, axis: str) -> str:
    """Which planned cells have no run, level by level."""
    if topic(results, "pays").empty:
        return NO_RUNS
    notes = {name: missing(_level(cells(results, "pays"), axis, level)) for level, name in AXES[axis].items()}
    return "\n".join(f"- {name}: {note}" for name, note in notes.items() if note) or "Every planned cell has runs."


def by_setup(results: Path, axis: str, level: float) -> str:
    """Arms by setups at one level: the difference of the metric to plain training."""
    frame = at(results, axis, level)
    planned = _level(cells(results, "pays"), axis, level)
    return noted(setup_table(frame, "score", planned["setup"].unique(), to=PLAIN), missing(planned))


def figure(results: Path, axis: str) -> str:
    """The metric against the level, a panel for each encoder, over the setups that all drawn arms have."""
    levels = AXES[axis]
    parts: dict[str, dict[str, Line]] = {}
    for model in ENCODERS:
        frames = {level: at(results, axis, level) for level in levels}
        wide = _wide({level: frame[frame["model"] == model] for level, frame in frames.items()})
        known = {level: f"at {level:g}" for level in levels if f"at {level:g}" in wide}
        parts[model] = common_lines(wide, DRAWN, known) if len(known) > 1 else {}
    names = [re.sub(" (rows|wrong labels)", "", name) for name in levels.values()]
    xlabel = {"noise": "wrong labels", "rows": "training rows"}[axis]
    return curves(parts, xlabel, "metric, mean over the tasks", names, list(levels))


def _wide(frames: Mapping[float, pd.DataFrame]) -> pd.DataFrame:
    """The metric at every level as a column; one row per setup, arm and seed.

    A setup is a task with a model here: a sample of few rows may be drawn from more rows than the other runs use.
    """
    keys, columns = ["setup", "arm", "seed"], []
    for level, frame in frames.items():
        where = zip(frame["task"], frame["model"], strict=True)
        names = [setup_name(task, None, model, lora=False) for task, model in where]
        found = frame.assign(setup=names).drop_duplicates(keys)
        columns += [found.set_index(keys)["score"].rename(f"at {level:g}")] if len(found) else []
    return pd.concat(columns, axis=1).reset_index() if columns else pd.DataFrame(columns=keys)
