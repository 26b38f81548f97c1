"""Differences to plain training over many setups, paired by seed, as tables that name what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from deltasam.lab.pages.evidence import PLAIN, arm_name, of_arm, paired, values
from deltasam.lab.pages.statistics import interval, stratified_interval, table

Groups = Mapping[str, Sequence[float]]
"""Setup -> one value per seed."""

ARMS = [arm_name(method) for method in (
    "ERM", "SAM", "DeltaSAM", "DeltaSAM(RandomWeights)", "PerInstanceSAM", "RandomPerturbation", "ERM+EMA", "ERM+SWA",
    "ERM+RDrop", "ERM+LabelSmoothing",
)]  # fmt: skip
"""The arms of the comparison, in the order of the tables."""

ENCODERS = ("bert-small-wiki", "minilm-l6")
NO_RUNS = "No runs yet."
FEWEST = 3  # seeds of a setup in a mean over setups


def arms_of(frame: pd.DataFrame, planned: Sequence[str] = ARMS) -> list[str]:
    """The arms of the planned kinds, also without runs, and then the others; settings in ascending order."""
    found = frame.drop_duplicates("arm").sort_values(["rho", "group"], kind="stable")
    known = {kind: list(cell) for kind, cell in found.groupby("kind", sort=False)["arm"]}
    kinds = dict.fromkeys([*planned, *frame["kind"].unique()])
    return [arm for kind in kinds for arm in known.get(kind, [kind])]


def counted(groups: Groups) -> Groups:
    """The setups that count in a mean over setups: those with three seeds or more, if any has.

    One or two seeds have no interval of their own, and would make the one of the mean too narrow.
    """
    enough = {setup: found for setup, found in groups.items() if len(found) >= FEWEST}
    return enough or groups


def common_setups(cells: Iterable[Groups]) -> list[str]:
    """The setups that all cells have, among those with three seeds everywhere if there are any.

    Means over them can be compared: :func:`counted` leaves out the same setups in each.
    """
    first, *others = list(cells) or [{}]
    least = {setup: min(len(cell.get(setup, ())) for cell in (first, *others)) for setup in first}
    enough = FEWEST if max(least.values(), default=0) >= FEWEST else 1
    return [setup for setup, count in least.items() if count >= enough]


def shown(groups: Groups, setups: int = 0, digits: int = 2) -> str:
    """The mean over the setups that count, each of them the same, with its interval; ``-`` if there is nothing.

    One or two seeds of a single setup have no interval.

    Args:
        groups: The values.
        setups: How many setups are expected; a smaller number of them is given.
        digits: Digits of the numbers.
    """
    if not groups:
        return "-"
    groups = counted(groups)
    count = "" if len(groups) >= setups else f" ({len(groups)} of {setups} setups)"
    if len(groups) == 1:
        (only,) = groups.values()
        if len(only) < FEWEST:
            return f"{np.mean(only):.{digits}f} (n = {len(only)}){count}"
        return interval(only, digits) + count
    mean, low, high = stratified_interval(groups)
    ends = f" [{low:.{digits}f}, {high:.{digits}f}]" if max(map(len, groups.values())) > 1 else ""
    return f"{mean:.{digits}f}{ends}{count}"


def mean(groups: Groups, digits: int = 2) -> str:
    """The mean over the setups that count, without an interval."""
    return f"{np.mean([np.mean(found) for found in counted(groups).values()]):.{digits}f}" if groups else "-"


def effect_table(
    frame: pd.DataFrame, metrics: Mapping[str, str], arms: Sequence[str] = ARMS, *, second: str = PLAIN
) -> str:
    """Arms by metrics: the second arm itself, then the differences of the others to it."""
    if frame.empty:
        return NO_RUNS
    base = of_arm(frame, second)
    wanted = {metric: len(counted(values(base, metric))) for metric in metrics}
    rows = [[second, *(mean(values(base, metric)) for metric in metrics)]]
    for arm in arms_of(frame, arms):
        if arm != second:
            own = of_arm(frame, arm)
            rows.append([arm, *(shown(paired(own, base, metric), wanted[metric]) for metric in metrics)])
    return table([f"difference to {second}", *metrics.values()], rows)


def setup_table(
    frame: pd.DataFrame, metric: str, setups: Sequence[str], arms: Sequence[str] = ARMS, *, to: str | None = None
) -> str:
    """Arms by setups: the mean of a metric with its interval, or the difference to another arm, paired by seed."""
    if frame.empty:
        return NO_RUNS
    columns = [*setups, *(setup for setup in frame["setup"].unique() if setup not in setups)]
    base = of_arm(frame, to) if to else None
    rows = []
    for arm in arms_of(frame, arms):
        own = of_arm(frame, arm)
        found = values(own, metric) if base is None else paired(own, base, metric)
        if arm != to:
            rows.append([arm, *(shown({setup: found[setup]}) if setup in found else "-" for setup in columns)])
    return table([f"difference to {to}" if to else "method", *columns], rows)


def missing(planned: pd.DataFrame) -> str:
    """Which planned cells have no run: one sentence, empty if there is none. Arms with the same gaps are together."""
    done = planned.groupby(["setup", "kind"], sort=False)["done"].any()
    lacked = {setup: tuple(cell[~cell].index.get_level_values("kind")) for setup, cell in done.groupby(level=0)}
    gaps: dict[tuple[str, ...], list[str]] = {}
    for setup in planned["setup"].unique():
        if lacked[setup]:
            every = len(lacked[setup]) == len(done[setup])
            gaps.setdefault(("every method",) if every else lacked[setup], []).append(setup)
    parts = [f"{', '.join(arms)} ({'; '.join(setups)})" for arms, setups in gaps.items()]
    return f"No runs yet: {', '.join(parts)}." if parts else ""


def noted(text: str, note: str) -> str:
    """A table, and below it which cells are missing."""
    return f"{text}\n\n{note}" if note and text != NO_RUNS else text
