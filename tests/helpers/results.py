"""Made-up result files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def write_run(
    folder: Path,
    task: str,
    method: dict[str, Any] | None = None,
    *,
    seed: int,
    metrics: dict[str, float],
    split: str = "validation",
    epochs: float = 3,
    lr: float = 1e-4,
    regularisers: Sequence[dict[str, Any]] = (),
    risk: float | None = None,
    steps: int = 10,
) -> None:
    """Writes a result.json with what the tables read."""
    own = {"name": "ERM", **(method or {})}
    primary = next(iter(metrics))
    config = {
        "task": {"name": task, "eval_split": split, "train_rows": None}, "method": own,
        "regularisers": list(regularisers), "optimizer": {"lr": lr}, "schedule": {"epochs": epochs, "steps": None},
        "seed": seed,
    }  # fmt: skip
    name = "+".join([own["name"], *(each["name"] for each in regularisers)])
    place = folder / f"run-{len(list(folder.glob('run-*'))) if folder.is_dir() else 0}"
    place.mkdir(parents=True)
    result = {
        "run_id": str(place), "task": task, "model": "bert-small-wiki", "method": name, "seed": seed,
        "primary_metric": primary, "higher_is_better": True, "best_value": metrics[primary] + 0.01,
        "metrics": metrics, "steps": steps, "train_rows": 492, "eval_rows": 256, "train_seconds": 1.0,
        "forward_passes": 10, "backward_passes": 10, "peak_memory_bytes": 1, "device": "cpu", "config": config,
    }  # fmt: skip
    (place / "result.json").write_text(json.dumps(result))
    if risk is not None:
        (place / "analysis").mkdir()
        (place / "analysis" / "adversarial-risk.json").write_text(json.dumps({"value": risk}))
