"""Decides whether the means of several methods say something about the methods, and which of them is the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from deltasam.lab.report._names import method_name
from deltasam.lab.report._runs import Run

MIN_SEEDS = 3
"""With fewer seeds there is no interval, no test and no best method."""


class Verdict(NamedTuple):
    """The best method of a setup, or why none is named."""

    best: str | None  #: The method.
    reasons: tuple[str, ...] = ()  #: Why there is none.


def differences(methods: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, list[str]]]:
    """Returns what differs besides the method: the name of each condition, its values, the methods that have them.

    The radius is compared among the methods that have one.
    """
    found: dict[str, dict[str, list[str]]] = {}
    names = dict.fromkeys(name for runs in methods.values() for run in runs for name, _ in run.conditions)
    for method, runs in methods.items():
        for run in runs[:1]:  # the runs of a method are repetitions
            given = dict(run.conditions)
            for name in names:
                _add(found, name, given.get(name, "none"), method)
            if run.radius:
                _add(found, "radius", run.radius, method)
    return {name: values for name, values in found.items() if len(values) > 1}


def verdict(methods: Mapping[str, Sequence[Run]], tried: Mapping[str, int]) -> Verdict:
    """Names the method with the best mean if only the method differs and each has at least three seeds.

    Args:
        methods: The runs of each method of one setup.
        tried: The number of settings of each method, of which the best is in ``methods``.
    """
    if len(methods) < 2:
        return Verdict(None)
    reasons = [f"{name} differs ({_values(values)})" for name, values in differences(methods).items()]
    counts: dict[str, list[str]] = {}
    for method in methods:
        counts.setdefault(str(tried.get(method, 1)), []).append(method)
    if len(counts) > 1:
        reasons.append(f"the number of settings tried differs ({_values(counts)})")
    few = [f"{method_name(m)} {len(runs)}" for m, runs in methods.items() if len(runs) < MIN_SEEDS]
    if few:
        reasons.append(f"fewer than {MIN_SEEDS} seeds ({', '.join(few)})")
    if reasons:
        return Verdict(None, tuple(reasons))
    means = {method: fmean(run.score for run in runs) for method, runs in methods.items()}
    best = (max if next(iter(methods.values()))[0].higher_is_better else min)(means.values())
    first = [method for method, mean in means.items() if mean == best]
    return Verdict(first[0]) if len(first) == 1 else Verdict(None, ("the best means are equal",))


def _add(found: dict[str, dict[str, list[str]]], name: str, value: str, method: str) -> None:
    found.setdefault(name, {}).setdefault(value, []).append(method)


def _values(values: Mapping[str, Sequence[str]]) -> str:
    """The values, the most frequent one without its methods: ``0.01; SAM, δ-SAM: 0.02``."""
    usual = max(values, key=lambda value: len(values[value]))
    others = [f"{', '.join(map(method_name, found))}: {_short(v)}" for v, found in values.items() if v != usual]
    return "; ".join([_short(usual), *others])


def _short(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:39]}…"
