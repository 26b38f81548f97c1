"""Wrong labels and few rows: the metric, NLL and ECE of every arm by condition, against plain training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pandas as pd

from deltasam.lab.pages.calibration import pair_table
from deltasam.lab.pages.curves import Line, curves
from deltasam.lab.pages.effects import (
    ENCODERS,
    FEWEST,
    NO_RUNS,
    arms_of,
    mean,
    missing,
    noted,
    setup_table,
    shown,
)
from deltasam.lab.pages.evidence import PLAIN, of_arm, paired, setup_name, topic, values
from deltasam.lab.pages.plan import cells
from deltasam.lab.pages.rounding import DRAWN
from deltasam.lab.pages.statistics import mean_and_ends, table
from deltasam.step.names import pluralized

NOISE = {0.0: "clean", 0.1: "10% wrong labels", 0.2: "20% wrong labels", 0.4: "40% wrong labels"}
ROWS = {0.0: "all rows", 1000.0: "1,000 rows", 250.0: "250 rows"}
AXES: Mapping[str, Mapping[float, str]] = {"noise": NOISE, "rows": ROWS}
_OTHER = {"noise": "rows", "rows": "noise"}
_TASKS = ("mrpc", "rte", "cola", "sst2")


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


def pairs(results: Path, axis: str, level: float) -> str:
    """The differences between methods that compete, at one level."""
    return pair_table(at(results, axis, level))


def gaps(results: Path, axis: str) -> str:
    """Which planned cells have no run, level by level."""
    if topic(results, "pays").empty:
        return NO_RUNS
    notes = {name: missing(_level(cells(results, "pays"), axis, level)) for level, name in AXES[axis].items()}
    return "\n".join(f"- {name}: {note}" for name, note in notes.items() if note) or "Every planned cell has runs."


def by_setup(results: Path, axis: str, level: float, metric: str = "score") -> str:
    """Arms by setups at one level: the difference of a metric to plain training."""
    frame = at(results, axis, level)
    planned = _level(cells(results, "pays"), axis, level)
    return noted(setup_table(frame, metric, planned["setup"].unique(), to=PLAIN), missing(planned))


def figure(results: Path, axis: str) -> str:
    """The metric against the level, a panel for each task and encoder. A point needs three seeds."""
    levels = AXES[axis]
    frames = {level: at(results, axis, level) for level in levels}
    parts = {
        setup_name(task, None, model, lora=False): lines
        for model, task in product(ENCODERS, _TASKS)
        if (lines := lines_of(frames, model, task))
    }
    names = [re.sub(" (rows|wrong labels)", "", name) for name in levels.values()]
    xlabel = {"noise": "wrong labels", "rows": "training rows"}[axis]
    shown = [level for level in levels if any(level in line for lines in parts.values() for line in lines.values())]
    ticks = [name for level, name in zip(levels, names, strict=True) if level in shown]
    return curves(parts or {"": {}}, xlabel, "metric", ticks, shown)


def lines_of(frames: Mapping[float, pd.DataFrame], model: str, task: str) -> dict[str, Line]:
    """Arm -> level -> mean with its interval, for the drawn arms that have several levels.

    Levels of plain training alone are left out. A sample of few rows may be drawn from more rows than the other runs
    use: it is the same panel.
    """
    lines: dict[str, Line] = {}
    for arm in DRAWN:
        line = {}
        for level, frame in frames.items():
            own = of_arm(frame[(frame["model"] == model) & (frame["task"] == task)], arm).drop_duplicates("seed")
            if len(own) >= FEWEST:
                line[level] = mean_and_ends(own["score"])
        if len(line) > 1:
            lines[arm] = line
    shared = {level for arm, line in lines.items() if arm != PLAIN for level in line}
    return {arm: {level: line[level] for level in line if level in shared} for arm, line in lines.items() if shared}
