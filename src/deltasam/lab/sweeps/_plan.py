"""From a sweep to its runs, and the choice of the best point of a grid on the development set."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from deltasam.lab.experiments._components import Plain
from deltasam.lab.experiments._config import RunConfig
from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments._resolve import merge, resolve
from deltasam.lab.experiments._result import Result, rank
from deltasam.lab.sweeps._file import Sweep
from deltasam.step.names import suggest

Point = tuple[tuple[str, Any], ...]
"""A point of a grid: settings with their values."""


@dataclass(frozen=True)
class Planned:
    """A run of a sweep, and where it stands in it.

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
    """The runs that the points are chosen by: methods that have more than one point, all points, the tuning seeds."""
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
    """The runs that are reported: the chosen point of each (setup, method), or all points where nothing was chosen.

    While the sweep is to tune and nothing is chosen for a method with several points yet, it has no final runs.
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
    """The best point of each (setup, method): the best mean of the primary metric over the seeds it was run with.

    Points with a run that has no result, or that diverged, are out; among equal means the first in the order of the
    grid wins. Where all points are out, nothing is chosen.
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
    """Every task with every model by a name of its own: two versions of a task, or of a model, are counted.

    Raises:
        ConfigError: A task or a model stands there twice.
    """
    for what, listed in (("tasks", sweep.tasks), ("models", sweep.models)):
        for number, one in enumerate(listed):
            if one in listed[:number]:
                raise ConfigError(f"{what}: {one} stands there twice")
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
        if point:
            sections = RunConfig.from_plain(sections).to_plain()  # every option spelled out, so that each is found
        for setting, value in point:
            sections = with_setting(sections, setting, value)
        return [Planned(setup, method, point, RunConfig.from_plain({**sections, "seed": seed})) for seed in seeds]
    except ConfigError as error:
        raise ConfigError(f"{setup}, {method}: {error}") from error


def _base(sweep: Sweep, setup: str, method: str) -> Plain:
    """The setup, what is common to all runs, and the method's own sections, which win."""
    own = sweep.methods[method]
    if setup in sweep.presets:
        return merge(merge(resolve(preset=setup, method=None if own else method).to_plain(), sweep.common), own)
    return merge(merge(_setups(sweep)[setup], sweep.common), own or {"method": method})


def with_setting(sections: Mapping[str, Any], setting: str, value: Any) -> Plain:
    """The sections with one setting; ``regularisers.0.scale`` reaches into a list."""
    changed: Any = copy.deepcopy(dict(sections))
    *path, last = setting.split(".")
    at = changed
    for part in path:
        at = _step(at, part, setting)
    if not isinstance(at, dict):
        raise ConfigError(f"{setting}: there is nothing that could have the option {last!r}")
    at[last] = value
    return dict(changed)


def _step(at: Any, part: str, setting: str) -> Any:
    if isinstance(at, list):
        if not part.isdigit() or int(part) >= len(at):
            raise ConfigError(f"{setting}: there are {len(at)} entries, counted from 0; {part!r} is none of them")
        return at[int(part)]
    if isinstance(at, dict) and part not in at:
        raise ConfigError(f"{setting}: there is no {part!r}; {suggest(part, at)}")
    return at[part] if isinstance(at, dict) else None


def _name(part: Any) -> str:
    if isinstance(part, Mapping):
        return str(part.get("name", part.get("path", part)))
    return str(part)
