"""Checks ``result.json`` files before they are shared: the format, and what would make runs impossible to compare.

``results/README.md`` describes the format for authors of other programs.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from deltasam.lab.report._runs import run_folders
from deltasam.step.names import suggest

# The fields of `deltasam.lab.experiments.Result`, which imports torch; a test compares them.
REQUIRED: dict[str, type] = {
    "run_id": str, "task": str, "model": str, "method": str, "seed": int,
    "primary_metric": str, "primary_value": float, "higher_is_better": bool, "best_value": float, "best_step": int,
    "metrics": dict, "steps": int, "train_rows": int, "eval_rows": int, "origins": dict, "parameters": int,
    "train_seconds": float, "eval_seconds": float, "forward_passes": int, "backward_passes": int,
    "skipped_steps": int, "peak_memory_bytes": int, "device": str, "config": dict, "environment": dict,
}  # fmt: skip
OPTIONAL: dict[str, type] = {"schema": int, "reliability": dict, "captured_steps": int}
SCHEMA = 1
LARGEST = 1_000_000  # bytes; logs are smaller, weights are larger

_KINDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false", dict: "an object"}
_CONFIG = {"task": dict, "model": dict, "method": dict, "regularisers": list, "optimizer": dict}


def check_runs(*folders: Path) -> dict[Path, list[str]]:
    """Checks all runs below the folders.

    Returns:
        For every run folder what is wrong with it, one sentence each; nothing if all is well.
    """
    found: dict[Path, list[str]] = {}
    places: dict[tuple[Path, str], Path] = {}  # two sweeps may hold the same run, one sweep may not
    for place in (run for folder in folders for run in run_folders(folder)):
        file = place / "result.json"
        if not file.is_file():
            found[place] = ["there is no result.json: the run is not finished; finish or remove it"]
            continue
        try:
            given = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            found[place] = [f"result.json is not JSON ({error}); write it again"]
            continue
        found[place] = list(check_result(given))
        if isinstance(given, dict) and isinstance(given.get("run_id"), str):
            first = places.setdefault((place.parent, given["run_id"]), place)
            if first != place:
                found[place].append(
                    f"run_id={given['run_id']!r}: {first.name} has it, too; tables would show only one of the two"
                )
        found[place] += list(_large_files(place))
    return found


def check_result(given: Any) -> Iterator[str]:
    """Yields what is wrong with the content of one ``result.json``.

    Example:
        >>> next(check_result({"schema": 2}))
        'schema=2: this version knows 1; update deltasam'
    """
    if not isinstance(given, dict):
        yield f"the file holds {reprlib.repr(given)}; it must hold an object with the fields of results/README.md"
        return
    if given.get("schema", SCHEMA) != SCHEMA:
        yield f"schema={given['schema']!r}: this version knows {SCHEMA}; update deltasam"
        return
    known = {**REQUIRED, **OPTIONAL}
    for name in REQUIRED:
        if name not in given:
            yield f"{name} is missing; it must be {_KINDS[REQUIRED[name]]}"
    for name, value in given.items():
        if name not in known:
            yield f"{name}: unknown field; {suggest(name, known)}; numbers belong to metrics, settings to config"
        elif not _is(value, known[name]):
            yield f"{name}={reprlib.repr(value)}: must be {_KINDS[known[name]]}"
    yield from _check_metrics(given)
    yield from _check_counts(given)
    if isinstance(given.get("config"), dict):
        yield from _check_config(given, given["config"])
    yield from _check_paths(given)
    if isinstance(given.get("reliability"), dict):
        yield from _check_bins(given["reliability"])


def _is(value: Any, kind: type) -> bool:
    if kind is float:  # strict JSON writes null for a metric that is not finite
        return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _check_metrics(given: Mapping[str, Any]) -> Iterator[str]:
    metrics, name, value = given.get("metrics"), given.get("primary_metric"), given.get("primary_value")
    if not isinstance(metrics, dict) or not isinstance(name, str):
        return
    for metric, number in metrics.items():
        if not _is(number, float):
            yield f"metrics.{metric}={reprlib.repr(number)}: must be a number, or null if it is not finite"
    if name not in metrics:
        yield f"primary_metric={name!r}: metrics has no such entry, only {', '.join(metrics) or 'none at all'}"
    elif _is(metrics[name], float) and _is(value, float) and not _same(metrics[name], value):
        yield f"primary_value={value}: metrics.{name} is {metrics[name]}; both must be the value of the final weights"


def _same(one: float | None, other: float | None) -> bool:
    first, second = (math.nan if value is None else float(value) for value in (one, other))
    return first == second or (math.isnan(first) and math.isnan(second))


def _check_counts(given: Mapping[str, Any]) -> Iterator[str]:
    for name, low in {"steps": 1, "train_rows": 1, "eval_rows": 1, "forward_passes": 0, "backward_passes": 0}.items():
        value = given.get(name)
        if isinstance(value, int) and value < low:
            yield f"{name}={value}: must be at least {low}"


def _check_config(given: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """What the tables read from the configuration."""
    for name, kind in _CONFIG.items():
        if not isinstance(config.get(name), kind):
            empty = "[]" if kind is list else "{...}"
            yield f"config.{name}={reprlib.repr(config.get(name))}: must be {empty}; the tables read settings from it"
            return
    if not _is(config["optimizer"].get("lr"), float) or config["optimizer"]["lr"] is None:
        yield f"config.optimizer.lr={config['optimizer'].get('lr')!r}: must be a number, the learning rate"
    if not isinstance(config["task"].get("eval_split"), str):
        yield "config.task.eval_split is missing; runs on different splits are not compared: name it"
    name, method = config["method"].get("name"), str(given.get("method"))
    if name != method.partition("+")[0]:
        yield f"config.method.name={name!r}: must be the first part of method={method!r}"
    if config.get("seed", given.get("seed")) != given.get("seed"):
        yield f"config.seed={config['seed']!r}: must be seed={given.get('seed')!r}"


def _check_paths(given: Mapping[str, Any]) -> Iterator[str]:
    """Paths of one machine: they say nothing to others, and the same model would get two names in a table."""
    config = given.get("config")
    places = {"model": given.get("model"), **_strings("origins", given.get("origins"))}
    if isinstance(config, dict):
        places |= _strings("config.model", config.get("model"))
    for name, value in places.items():
        if isinstance(value, str) and (PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()):
            yield f"{name}={value!r}: a path of your machine; give the name by which others find it"


def _strings(name: str, values: Any) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in values.items()} if isinstance(values, dict) else {}


def _check_bins(reliability: Mapping[str, Any]) -> Iterator[str]:
    for name, bins in reliability.items():
        rows = bins if isinstance(bins, list) else [None]
        if not all(
            isinstance(row, list) and len(row) == 3 and all(_is(value, float) for value in row) for row in rows
        ):
            yield f"reliability.{name}: must be a list of bins [count, confidence, accuracy]"


def _large_files(place: Path) -> Iterator[str]:
    for path in sorted(place.rglob("*")):
        if path.is_file() and path.stat().st_size > LARGEST:
            size = path.stat().st_size / 1e6
            yield f"{path.relative_to(place)} has {size:.0f} MB; share results without weights and checkpoints"
