"""The runs that the sweep files plan, and which of them are still missing in ``results/``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from deltasam.lab.pages.runs import TASKS, read
from deltasam.lab.pages.statistics import table

MODELS_ONLY = ("weights", "rounding")
"""Sweeps that train models for other measurements; their runs are not kept, or not in the folder of the sweep."""


def planned(file: Path, scores: Mapping[str, float]) -> Iterator[tuple[Any, bool]]:
    """The runs of a sweep and whether each is a final run; at the settings that the scores of the tuning runs choose.

    Args:
        file: The sweep.
        scores: Run id -> score of the finished runs.
    """
    from deltasam.experiments.sweeps import final_runs, read_sweep, tuning_runs

    sweep = read_sweep(file)
    points: dict[tuple[str, str], dict[Any, list[float]]] = {}
    for run in tuning_runs(sweep):
        yield run, False
        if run.config.run_id in scores:
            cell = points.setdefault((run.setup, run.method), {})
            cell.setdefault(run.point, []).append(scores[run.config.run_id])
    chosen = {cell: max(tried, key=lambda point: fmean(tried[point])) for cell, tried in points.items()}
    for run in final_runs(sweep, chosen):
        yield run, True


def sweep_files(root: Path) -> list[Path]:
    """The sweeps whose runs are in ``results/``."""
    files = sorted((root / "configs" / "sweeps" / "evidence").glob("*.yaml"))
    return [file for file in files if not file.stem.startswith(MODELS_ONLY)]


def missing(root: Path) -> str:
    """A row for every method of a sweep with fewer runs than planned."""
    results = root / "results"
    runs = read(results, *sorted(path.name for path in results.iterdir() if path.is_dir()))
    scores = dict(zip(runs["run_id"], runs["score"], strict=True))
    rows = []
    for file in sweep_files(root):
        counts: dict[tuple[str, str, bool], list[bool]] = {}
        for run, final in planned(file, scores):
            counts.setdefault((run.config.task.name, run.method, final), []).append(run.config.run_id in scores)
        gaps: dict[tuple[str, str], list[str]] = {}
        for (task, method, final), there in counts.items():
            if not all(there):
                what = f"{there.count(False)} of {len(there)}{'' if final else ' tuning runs'}"
                gaps.setdefault((task, what), []).append(method)
        rows += [[f"`{file.stem}.yaml`", TASKS.get(task, task), what, ", ".join(methods)]
                 for (task, what), methods in gaps.items()]  # fmt: skip
    return table(["sweep", "task", "missing", "of each of the methods"], rows)
