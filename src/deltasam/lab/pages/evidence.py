"""The runs of ``results/`` as one frame: model, task and condition, the arm, and everything that was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from deltasam.lab.pages.runs import TASKS
from deltasam.lab.report import Run, method_name, read_runs

PLAIN = "ERM"
OTHER_MASKS = "pays-other-masks"
"""Runs of the sweeps of ``pays`` whose dropout masks are not those of the runs of plain training in ``pays``."""
TOPICS = ("pays", "pays-groups", "pays-llm", OTHER_MASKS, "shift", "base")
"""The folders of runs, and the sweeps that make them; a longer name may follow after a hyphen."""
_OTHER_SEEDS = 1_000_000  # added to the seeds of runs with other masks: their draws are not those of the same seed

_NAMES = {"RandomPerturbation": "random perturbation"}
_KEYS = (
    "run_id", "model", "task", "part", "noise", "rows", "setup", "method", "params", "kind", "arm", "rho", "group",
    "seed", "score", "risk", "reliability",
)  # fmt: skip


@lru_cache
def evidence(results: Path, *folders: str) -> pd.DataFrame:
    """One row per finished run of the folders that exist; runs that choose settings are left out.

    The columns are those of ``_KEYS`` and the metrics. ``kind`` is the method and whether it perturbs frozen weights;
    ``arm`` adds the settings of which a setup has several values. ``setup`` is model, task and what is trained: an arm
    is compared with plain training of the same setup, seed and condition (``noise``, ``rows``). Metrics are times 100,
    except the temperature. The primary metric is ``score``, and after rounding ``score_4bit``, on another set
    ``score_on_qqp``. If two runs differ in nothing that a row or a column shows, the first counts.
    """
    found = [_record(run) for folder in folders for run in read_runs(results / folder).finished if _is_final(run)]
    frame = pd.DataFrame(found, columns=None if found else [*_KEYS, "settings"])
    frame = frame.drop_duplicates("run_id")
    if frame.empty:
        return frame
    return with_arms(frame).drop_duplicates(["setup", "noise", "rows", "arm", "seed"]).reset_index(drop=True)


def topic(results: Path, name: str) -> pd.DataFrame:
    """The runs of the folders of a topic: ``pays`` has those of ``pays-noise``, too, but not of ``pays-llm``.

    Runs with other dropout masks count as further seeds once plain training has run with these masks, too: they are
    paired with it alone.
    """
    folders = sorted(path.name for path in results.iterdir() if path.is_dir()) if results.is_dir() else []
    own = tuple(folder for folder in folders if belongs(folder, name))
    others = tuple(folder for folder in folders if name == "pays" and belongs(folder, OTHER_MASKS))
    return _with_other_masks(results, own, others) if others else evidence(results, *own)


def belongs(name: str, topic: str) -> bool:
    """Whether a folder or a sweep belongs to a topic."""
    return topic_of(name) == topic


def topic_of(name: str) -> str:
    """The topic of a folder or a sweep: the longest of :data:`TOPICS` with which its name starts, or ``""``."""
    return max((each for each in TOPICS if f"{name}-".startswith(f"{each}-")), key=len, default="")


@lru_cache
def _with_other_masks(results: Path, own: tuple[str, ...], others: tuple[str, ...]) -> pd.DataFrame:
    """The runs of ``own``, and those of ``others`` that can be paired; cells that both have count in ``own`` only."""
    frame, more = evidence(results, *own), evidence(results, *others)
    plain = more[more["kind"] == PLAIN]
    if plain.empty:
        return frame
    cell = ["setup", "noise", "rows", "seed"]
    known = more[["kind", *cell]].merge(frame[["kind", *cell]].drop_duplicates(), how="left", indicator=True)["_merge"]
    new = (more["kind"] == PLAIN) | (known == "left_only")
    paired = more[new].merge(plain[cell])
    return with_arms(pd.concat([frame, paired.assign(seed=paired["seed"] + _OTHER_SEEDS)], ignore_index=True))


def with_arms(frame: pd.DataFrame) -> pd.DataFrame:
    """Names the arms again, after some runs were left out."""
    return frame.assign(arm=list(_arms(frame)))


def clean(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs with all rows and their own labels."""
    return frame[(frame["noise"] == 0) & (frame["rows"] == 0)]


def values(frame: pd.DataFrame, metric: str) -> dict[str, list[float]]:
    """Setup -> the metric of every seed; setups without it are left out."""
    return _by_setup(_by_seed(frame, metric))


def paired(first: pd.DataFrame, second: pd.DataFrame, metric: str) -> dict[str, list[float]]:
    """Setup -> differences of the metric, first minus second, over the seeds that both have."""
    one, other = _by_seed(first, metric), _by_seed(second, metric)
    return _by_setup({key: one[key] - other[key] for key in one.keys() & other.keys()})


def of_arm(frame: pd.DataFrame, arm: str) -> pd.DataFrame:
    """The runs of an arm."""
    return frame[frame["arm"] == arm]


def arm_name(method: str, params: str = "trained") -> str:
    """The name of a method as the tables show it, and whether it perturbs frozen weights."""
    return (_NAMES.get(method) or method_name(method)) + (", frozen weights" if params == "base" else "")


def setup_name(task: str, rows: int | None, model: str, *, lora: bool) -> str:
    """Task, rows where only some are used, model, and whether adapters are trained."""
    name, size = task.removesuffix("-prompt"), f"{rows:,} rows" if rows else ""
    return ", ".join(filter(None, (TASKS.get(name, name), size, model.rpartition("/")[2], "LoRA" if lora else "")))


def _by_seed(frame: pd.DataFrame, metric: str) -> dict[tuple[str, int], float]:
    if metric not in frame:
        return {}
    found = zip(frame["setup"], frame["seed"], frame[metric], strict=True)  # faster than an index for small frames
    return {(setup, seed): float(value) for setup, seed, value in found if math.isfinite(value)}


def _by_setup(found: Mapping[tuple[str, int], float]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = {}
    for setup, seed in sorted(found):
        groups.setdefault(setup, []).append(found[setup, seed])
    return groups


def _is_final(run: Run) -> bool:
    return not run.evaluation.is_part


def _record(run: Run) -> dict[str, Any]:
    given = json.loads((run.path / "result.json").read_bytes())
    task, model, method = (_section(given["config"], name) for name in ("task", "model", "method"))
    settings, risk = dict(run.settings), run.risk()
    lora, params = bool(model.get("lora")), str(method.get("params", "trained"))
    return {
        **_metrics(run),
        "run_id": run.run_id, "model": run.model.rpartition("/")[2], "task": run.task,
        "part": "LoRA" if lora else "", "setup": setup_name(run.task, task.get("train_rows"), run.model, lora=lora),
        "noise": float(task.get("label_noise") or 0), "rows": int(task.get("rows") or 0),
        "method": run.method, "params": params, "kind": arm_name(run.method, params), "settings": settings,
        "rho": settings.get("rho"), "group": settings.get("group"), "seed": run.seed,
        "risk": math.nan if risk is None else risk["value"], "reliability": given.get("reliability") or {},
    }  # fmt: skip


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _metrics(run: Run) -> dict[str, float]:
    scaled = {name: value if name == "temperature" else 100 * value for name, value in run.metrics.items()}
    start = f"{run.primary}_"
    shared = {f"score_{name.removeprefix(start)}": v for name, v in scaled.items() if name.startswith(start)}
    return {**scaled, **shared, "score": scaled[run.primary]}


def _arms(frame: pd.DataFrame) -> Iterator[str]:
    """The kind of arm, with the settings of which a setup has several values."""
    several: dict[str, list[str]] = {}
    for (kind, *_), cell in frame.groupby(["kind", "setup", "noise", "rows"], sort=False)["settings"]:
        known = several.setdefault(str(kind), [])
        keys = dict.fromkeys(key for settings in cell for key in settings if key != "seed")
        known += [k for k in keys if k not in known and len({settings.get(k) for settings in cell}) > 1]
    for kind, settings in zip(frame["kind"], frame["settings"], strict=True):
        yield ", ".join([kind, *(f"{key} = {settings[key]:g}" for key in several[kind] if key in settings)])
