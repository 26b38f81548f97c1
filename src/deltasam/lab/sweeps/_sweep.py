"""Runs a sweep: tunes, chooses points, makes the missing runs, records everything."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltasam.integrations.storage import write_text
from deltasam.lab.experiments import Result, changed_runs
from deltasam.lab.plugins import named_plugins
from deltasam.lab.sweeps._file import Sweep
from deltasam.lab.sweeps._measure import is_measured
from deltasam.lab.sweeps._plan import Planned, Point, final_runs, select, tuning_runs
from deltasam.lab.sweeps._pool import Event, LocalPool
from deltasam.lab.sweeps._ray import RayPool
from deltasam.lab.sweeps._worker import Job

JOURNAL = "sweep.jsonl"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a sweep.

    Attributes:
        results: The runs that are reported, with their results.
        failed: The error of every run without a result by its name, and of every setup and method without a choice.
        chosen: The chosen point of the grid by (setup, method).
        trained: Number of runs made by this call; the others existed.
    """

    results: list[tuple[Planned, Result]]
    failed: dict[str, str]
    chosen: dict[tuple[str, str], Point]
    trained: int


def run_sweep(
    sweep: Sweep,
    folder: Path,
    pool: LocalPool | RayPool,
    *,
    data: str | None = None,
    watch: Callable[[Event], None] = lambda event: None,
    announce: Callable[[Sequence[Planned]], None] = lambda runs: None,
) -> Outcome:
    """Makes the missing runs. Interrupted runs resume from their last checkpoint; finished ones are not repeated.

    A failed run is retried once, unless its input is wrong. If it fails again, the error is recorded
    (``failures/<run>.txt``, ``sweep.jsonl``), the other runs continue, and the next call retries it.

    Args:
        sweep: The sweep.
        folder: Parent of the run folders.
        pool: Where to run them.
        data: Folder with the datasets.
        watch: Called with every event.
        announce: Called with the runs of each stage before it starts.

    Returns:
        Results, failures and choices.

    Raises:
        ConfigError: The configuration of a run is wrong; nothing has been run.
    """
    if data is not None:
        sweep = dataclasses.replace(sweep, common={**sweep.common, "data": data})
    tuning = tuning_runs(sweep)
    by_id: dict[str, Planned] = {}
    for planned in (*tuning, *final_runs(sweep, {})):
        by_id.setdefault(planned.config.run_id, planned)
    stage = list(by_id.values())
    folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    announce(stage)
    trained = _run_missing(sweep, stage, folder, pool, watch, failed, without_risk=_only_for_choosing(sweep, tuning))
    tuned = [pair for planned in tuning if (pair := _finished(planned, folder)) is not None]
    chosen = select(tuned)
    for planned, _ in tuned:
        if (planned.setup, planned.method) not in chosen:
            failed[f"{planned.setup}, {planned.method}"] = "every point of the grid diverged, so none was chosen"
    if chosen:
        _record_choice(folder, chosen)
    final = final_runs(sweep, chosen)
    if chosen:
        announce(final)
        trained += _run_missing(sweep, final, folder, pool, watch, failed)
    results = [pair for planned in final if (pair := _finished(planned, folder)) is not None]
    return Outcome(results, failed, chosen, trained)


def _run_missing(
    sweep: Sweep,
    runs: Sequence[Planned],
    folder: Path,
    pool: LocalPool | RayPool,
    watch: Callable[[Event], None],
    failed: dict[str, str],
    without_risk: Collection[str] = (),
) -> int:
    jobs = [
        Job(
            name=name,
            config=planned.config.to_plain(),
            folder=folder,
            keep=sweep.keep,
            risk=risk,
            plugins=",".join(named_plugins()),
        )
        for planned in runs
        for risk in [None if planned.config.run_id in without_risk else sweep.risk]
        if _is_missing(folder / (name := planned.config.run_name), risk) and name not in failed
    ]
    _warn_about_other_rows(runs, folder)
    trained = 0
    events = pool.run(jobs)
    try:
        for event in events:
            if event.kind != "step":
                _record(folder, event)
            if event.kind == "failed":
                failed[event.run] = event.error
            trained += event.kind == "finished"
            watch(event)
    finally:
        events.close()  # ends the workers
    return trained


def _warn_about_other_rows(runs: Sequence[Planned], folder: Path) -> None:
    """Finished runs are not repeated, so their results may belong to other rows than those of the runs made now."""
    changed = changed_runs((planned.config, folder / planned.config.run_name) for planned in runs)
    if changed:
        place, split = next(iter(changed.items()))
        _log.warning(
            "the rows of %s have changed since %s made, such as %s; the results belong to the earlier rows: choose "
            "another folder by --output to train on the present ones, or remove these runs",
            split, "1 finished run was" if len(changed) == 1 else f"{len(changed)} finished runs were", place.name,
        )  # fmt: skip


def _only_for_choosing(sweep: Sweep, tuning: Sequence[Planned]) -> set[str]:
    """The ids of tuning runs that cannot be final runs: nobody needs their risk."""
    if sweep.tune is None or (not sweep.tune.common and set(sweep.tune.seeds) & set(sweep.seeds)):
        return set()
    return {planned.config.run_id for planned in tuning}


def _is_missing(place: Path, risk: dict[str, Any] | None) -> bool:
    """Whether a run has no result yet, or not the risk that is asked for although it has weights."""
    if not (place / "result.json").is_file():
        return True
    return risk is not None and (place / "model").is_dir() and not is_measured(place, **risk)


def _finished(planned: Planned, folder: Path) -> tuple[Planned, Result] | None:
    path = folder / planned.config.run_name / "result.json"
    return (planned, Result.read(path)) if path.is_file() else None


def _record(folder: Path, event: Event) -> None:
    line = {"time": round(time.time(), 1), **{key: value for key, value in vars(event).items() if value}}
    with (folder / JOURNAL).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _record_choice(folder: Path, chosen: dict[tuple[str, str], Point]) -> None:
    """Records the chosen points, and keeps those of other sweeps in the same folder."""
    path = folder / "selection.json"
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        others = [line for line in before if (line["setup"], line["method"]) not in chosen]
    except (OSError, ValueError, TypeError, KeyError):  # missing or damaged
        others = []
    lines = [{"setup": setup, "method": method, **dict(point)} for (setup, method), point in chosen.items()]
    write_text(path, json.dumps([*others, *lines], indent=1))
