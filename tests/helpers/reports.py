"""Synthetic finished runs: a result.json with any metrics, settings and log, for tests of the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_run(
    folder: Path,
    method: str = "ERM",
    seed: int = 1,
    *,
    score: float = 0.8,
    rho: Any = None,
    metrics: Mapping[str, float] | None = None,
    config: Mapping[str, Mapping[str, Any]] | None = None,
    log: Sequence[Mapping[str, float]] = (),
    **fields: Any,
) -> Path:
    """Writes a run of a task with two classes and returns its folder.

    Args:
        folder: Folder of all runs.
        method: Name of the method.
        seed: Seed.
        score: Accuracy.
        rho: Radius; by default the method has none.
        metrics: More metrics.
        config: Changes by section, such as ``{"optimizer": {"lr": 1e-3}}``.
        log: Entries of ``metrics.jsonl``.
        **fields: Other fields of the result.
    """
    given: dict[str, Any] = {
        "task": {
            "name": "reviews", "metrics": ["accuracy"], "train_split": "train", "eval_split": "validation",
            "train_rows": None, "eval_rows": None, "files": {}, "kind": "classification", "classes": ["bad", "good"],
        },
        "model": {"path": "models/tiny"},
        "method": {"name": method} | ({} if rho is None else {"rho": rho}),
        "optimizer": {"lr": 1e-4},
        "schedule": {"epochs": 3.0},
        "batch": {"size": 32},
    }  # fmt: skip
    for section, changes in (config or {}).items():
        given[section] = {**given[section], **changes}
    number = len(list(folder.glob("run-*"))) if folder.is_dir() else 0
    result = {
        "schema": 1, "run_id": f"id-{number}", "task": "reviews", "model": "models/tiny", "method": method,
        "seed": seed, "primary_metric": "accuracy", "primary_value": score, "higher_is_better": True,
        "best_value": score, "best_step": 9, "metrics": {"accuracy": score, "loss": 0.5, **(metrics or {})},
        "steps": 9, "train_rows": 96, "eval_rows": 400, "train_seconds": 9.0, "eval_seconds": 1.0,
        "forward_passes": 9, "backward_passes": 9, "peak_memory_bytes": 2**28, "device": "cpu",
        "config": {**given, "regularisers": [], "average": None, "precision": "fp32", "seed": seed}, **fields,
    }  # fmt: skip
    place = folder / f"run-{number}"
    place.mkdir(parents=True)
    (place / "result.json").write_text(json.dumps(result), encoding="utf-8")
    if log:
        (place / "metrics.jsonl").write_text("\n".join(map(json.dumps, log)), encoding="utf-8")
    return place


def bins(shift: float) -> list[list[float]]:
    """Fifteen bins of a model whose confidence exceeds its accuracy by ``shift``; those below 0.5 are empty."""
    middles = [(number + 0.5) / 15 for number in range(15)]
    return [[0, 0.0, 0.0] if middle < 0.5 else [100 * middle, middle, middle - shift] for middle in middles]


def write_measured_runs(folder: Path) -> None:
    """Writes runs of three methods and three seeds that have every measurement of the report, except landscapes."""
    for number, (method, radii) in enumerate({"ERM": [None], "SAM": [0.01, 0.05], "PerInstanceSAM": [0.01]}.items()):
        for rho in radii:
            for seed in (1, 2, 3):
                score = 0.8 + 0.02 * number + 0.002 * seed + (0.01 if rho == 0.01 else 0.0)
                rounded = {
                    f"accuracy_{bits}bit{kind}": score - loss / (number + 1)
                    for bits, loss in ((8, 0.0), (4, 0.03), (3, 0.2))
                    for kind in ("", "_channel")
                }
                metrics = {
                    "ece": 0.1 - 0.02 * number, "ece_low": 0.05, "ece_high": 0.12, "nll": 0.5, "brier": 0.3,
                    "temperature": 1.5, "ece_scaled": 0.03, "nll_scaled": 0.45, "brier_scaled": 0.29,
                    "accuracy_on_films": score - 0.1, "ece_on_films": 0.2,
                    "forgetting": 0.1 - 0.5 * (rho or 0) + seed / 100,
                    **rounded,
                }  # fmt: skip
                log = [{"step": step, "loss": 0.7 - 0.02 * step - number / 50} for step in range(1, 9)]
                if rho:
                    log = [{**entry, "sharpness": 0.01 + rho * entry["step"]} for entry in log]
                log += [{"step": step, "eval_accuracy": score - 0.1 + step / 90} for step in (3, 6, 9)]
                shown = {"evaluation": bins(0.1 - 0.03 * number), "scaled": bins(0.02), "on_films": bins(0.2)}
                write_run(
                    folder, method, seed, score=score, rho=rho, metrics=metrics, log=log, reliability=shown,
                    train_seconds=9.0 * (number + 1),
                )  # fmt: skip
