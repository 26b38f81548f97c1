"""Expands a sweep to its runs, and chooses the best point of a grid on the development set."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from deltasam.lab.experiments import ConfigError, Result, RunConfig, rank, resolve, with_learning_rate
from deltasam.lab.experiments.plain import Plain, merge
from deltasam.lab.sweeps._file import Sweep
from deltasam.step.names import suggest

Point = tuple[tuple[str, Any], ...]
"""A point of a grid: settings with their values."""


@dataclass(frozen=True)
class Planned:
    """A run of a sweep, with its setup, method and point.

    Attributes:
        setup: The preset, or ``task/model``.
        method: Label of the method.
        point: Point of the method's grid.
        config: The run.
    """

    setup: str
    method: str
    point: Point
    config: RunConfig


def tuning_runs(sweep: Sweep) -> list[Planned]:
    """Returns the runs that points are chosen by: all points of methods with more than one, with the tuning seeds."""
    if sweep.tune is None:
        return []
    return [
        planned
        for setup, method in _cells(sweep)
        if len(points := _points(sweep, method)) > 1
        for point in points
        for planned in _runs(sweep, setup, method, point, sweep.tune.seeds, sweep.tune.common)
    ]


def final_runs(sweep: Sweep, chosen: Mapping[tuple[str, str], Point]) -> list[Planned]:
    """Returns the runs that are reported: the chosen point of each (setup, method), or all points without tuning.

    With tuning, a method with several points has no final runs until one is chosen.
    """
    found = []
    for setup, method in _cells(sweep):
        points = _points(sweep, method)
        if sweep.tune is not None and len(points) > 1:
            points = [chosen[setup, method]] if (setup, method) in chosen else []
        for point in points:
            found += _runs(sweep, setup, method, point, sweep.seeds, {})
    return found


def select(runs: Sequence[tuple[Planned, Result]]) -> dict[tuple[str, str], Point]:
    """Returns the best point of each (setup, method), by the mean of the primary metric over its seeds.

    Points with a missing or diverged run are excluded. Of equal means, the first in the order of the grid wins. If all
    points are excluded, none is chosen.
    """
    cells: dict[tuple[str, str], dict[Point, list[Result]]] = {}
    for planned, result in runs:
        cells.setdefault((planned.setup, planned.method), {}).setdefault(planned.point, []).append(result)
    chosen = {}
    for cell, points in cells.items():
        most = max(len(results) for results in points.values())
        means = {p: fmean(r.score for r in results) for p, results in points.items() if len(results) == most}
        higher = next(iter(points.values()))[0].higher_is_better
        best = max(means, key=lambda point: rank(means[point], higher_is_better=higher))
        if math.isfinite(means[best]):
            chosen[cell] = best
    return chosen


def _cells(sweep: Sweep) -> Iterator[tuple[str, str]]:
    return itertools.product([*sweep.presets, *_setups(sweep)], sweep.methods)


def _setups(sweep: Sweep) -> dict[str, Plain]:
    """Returns every task with every model by a unique name; versions of the same task and model are numbered."""
    found: dict[str, Plain] = {}
    for task, model in itertools.product(sweep.tasks, sweep.models):
        name = f"{_name(task)}/{_name(model)}"
        count = sum(known.partition(" (")[0] == name for known in found)
        found[f"{name} ({count + 1})" if count else name] = {"task": task, "model": model}
    return found


def _points(sweep: Sweep, method: str) -> list[Point]:
    grid = sweep.grid.get(method, {})
    return [tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _runs(
    sweep: Sweep, setup: str, method: str, point: Point, seeds: Sequence[int], common: Mapping[str, Any]
) -> list[Planned]:
    try:
        sections = merge(_base(sweep, setup, method), common)
        if "optimizer.lr" not in dict(point):
            sections = with_learning_rate(sections)
        if point:
            sections = RunConfig.from_plain(sections).to_plain()  # with all options, so that each can be set
        for setting, value in point:
            sections = with_setting(sections, setting, value)
        first = RunConfig.from_plain({**sections, "seed": seeds[0]})  # a table of results plans thousands of runs
        configs = [first, *(first.with_seed(seed) for seed in seeds[1:])]
        return [Planned(setup, method, point, config) for config in configs]
    except ConfigError as error:
        raise ConfigError(f"{setup}, {method}: {error}") from error


def _base(sweep: Sweep, setup: str, method: str) -> Plain:
    """Merges the setup, the sections common to all runs, and those of the method; later ones win."""
    own = sweep.methods[method]
    if setup in sweep.presets:
        return merge(merge(resolve(preset=setup, method=None if own else method).to_plain(), sweep.common), own)
    return merge(merge(_setups(sweep)[setup], sweep.common), own or {"method": method})


def with_setting(sections: Mapping[str, Any], setting: str, value: Any) -> Plain:
    """Returns the sections with one setting changed; ``regularisers.0.scale`` indexes a list."""
    changed: Any = copy.deepcopy(dict(sections))
    *path, last = setting.split(".")
    at = changed
    for part in path:
        at = _step(at, part, setting)
    if not isinstance(at, dict):
        raise ConfigError(f"{setting}: {'.'.join(path)} has no options, so none named {last!r}")
    at[last] = value
    return dict(changed)


def _step(at: Any, part: str, setting: str) -> Any:
    if isinstance(at, list):
        if not part.isdigit() or int(part) >= len(at):
            raise ConfigError(f"{setting}: {part!r} is not an index of its {len(at)} entries, counted from 0")
        return at[int(part)]
    if isinstance(at, dict) and part not in at:
        raise ConfigError(f"{setting}: there is no {part!r}; {suggest(part, at)}")
    return at[part] if isinstance(at, dict) else None


def _name(part: Any) -> str:
    """The name of a task or a model; of a model in a folder, that of the folder."""
    given = part.get("name", part.get("path", part)) if isinstance(part, Mapping) else part
    return str(given).rstrip("/").rpartition("/")[2]
