"""The runs that the sweep files plan, and which of them are still missing in ``results/``."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from deltasam.lab.pages import evidence
from deltasam.lab.pages.runs import TASKS, read
from deltasam.lab.pages.statistics import table

MODELS_ONLY = ("weights", "rounding")
"""Sweeps that train models for other measurements; their runs are not kept, or are in another folder."""


@lru_cache
def finals_of(file: Path) -> list[Any]:
    """The final runs of a sweep whose settings need not be chosen."""
    from deltasam.lab.sweeps import final_runs, read_sweep

    return list(final_runs(read_sweep(file), {}))


@lru_cache
def cells(results: Path, topic: str, *also: str) -> pd.DataFrame:
    """One row per planned run of a topic: kind of arm, setup, condition, and whether it exists here or in ``also``."""
    known = {run_id for each in (topic, *also) for run_id in evidence.topic(results, each)["run_id"]}
    rows = []
    for file in sorted((results.parent / "configs" / "sweeps" / "evidence").glob("*.yaml")):
        for run in finals_of(file) if evidence.belongs(file.stem, topic) else ():
            config = run.config
            task = config.task
            setup = evidence.setup_name(task.name, task.train_rows, config.model.path, lora=bool(config.model.lora))
            noise, few = getattr(task, "label_noise", 0.0), getattr(task, "rows", None)
            rows.append((_kind(config), setup, float(noise), int(few or 0), config.run_id in known))
    return pd.DataFrame(rows, columns=["kind", "setup", "noise", "rows", "done"])


def _kind(config: Any) -> str:
    """The kind of arm of a run, as its result will name it."""
    weighting = getattr(config.method, "weighting", None)
    name, *others = config.arm
    if weighting is not None and type(weighting).__name__ != "FiniteDifference":
        name = f"{name}({type(weighting).__name__})"
    return evidence.arm_name("+".join([name, *others]), config.method.params)


@lru_cache
def planned(root: Path) -> pd.DataFrame:
    """One row per run of the sweeps in ``configs/sweeps/evidence``: sweep, task, method, id, final or tuning, done.

    Final runs are those at the settings that the finished tuning runs choose. A run of a topic counts in its folders
    only: the same run elsewhere may be older, and lack what the topic's tables show.
    """
    from deltasam.lab.sweeps import final_runs, read_sweep, tuning_runs

    results = root / "results"
    folders = sorted(path.name for path in results.iterdir() if path.is_dir())
    rows = []
    for file in sorted((root / "configs" / "sweeps" / "evidence").glob("*.yaml")):
        if file.stem.startswith(MODELS_ONLY):
            continue
        sweep, topic = read_sweep(file), evidence.topic_of(file.stem)
        known = read(results, *(name for name in folders if not topic or evidence.belongs(name, topic)))
        scores = dict(zip(known["run_id"], known["score"], strict=True)) if len(known) else {}
        done = scores.keys() | (set(evidence.topic(results, topic)["run_id"]) if topic else set())
        tuning = [(run, run.config.run_id) for run in tuning_runs(sweep)]
        points: dict[tuple[str, str], dict[Any, list[float]]] = {}
        for run, run_id in tuning:
            if run_id in scores:
                points.setdefault((run.setup, run.method), {}).setdefault(run.point, []).append(scores[run_id])
        chosen = {cell: max(tried, key=lambda point: fmean(tried[point])) for cell, tried in points.items()}
        runs = final_runs(sweep, chosen) if chosen else finals_of(file)
        final = [(run, run.config.run_id) for run in runs]
        rows += [
            (file.stem, run.config.task.name, run.method, run_id, kind, run_id in done)
            for kind, found in (("tuning", tuning), ("final", final))
            for run, run_id in found
        ]
    return pd.DataFrame(rows, columns=["sweep", "task", "method", "run_id", "kind", "done"])


def missing(root: Path) -> str:
    """How many runs are missing, by sweep and task."""
    counts = planned(root).groupby(["sweep", "task", "kind", "method"], sort=False)["done"].agg(["size", "sum"])
    gaps = counts[counts["sum"] < counts["size"]].reset_index()
    gaps["missing"] = [f"{n - done} of {n} {kind} runs" for n, done, kind in gaps[["size", "sum", "kind"]].to_numpy()]
    rows = [
        [f"`{sweep}.yaml`", TASKS.get(task, task), what, ", ".join(methods)]
        for (sweep, task, what), methods in gaps.groupby(["sweep", "task", "missing"], sort=False)["method"]
    ]
    return table(["sweep", "task", "missing", "of each of the methods"], rows)
