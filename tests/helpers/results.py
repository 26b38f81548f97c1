"""Made-up result files, the scripts that make the page of results from them, and the cells of its tables."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SWEEPS = ROOT / "configs" / "sweeps" / "evidence"


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / f"results_{name}.py"))


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
) -> None:
    """A result.json with what the page reads."""
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
        "metrics": metrics, "steps": 10, "train_rows": 492, "eval_rows": 256, "train_seconds": 1.0,
        "forward_passes": 10, "backward_passes": 10, "peak_memory_bytes": 1, "device": "cpu", "config": config,
    }  # fmt: skip
    (place / "result.json").write_text(json.dumps(result))
    if risk is not None:
        (place / "analysis").mkdir()
        (place / "analysis" / "adversarial-risk.json").write_text(json.dumps({"value": risk}))


def cells(page: str, first: str) -> list[list[str]]:
    """The rows of tables that begin with this cell."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:1] == "|"]
    return [row for row in rows if row[0] == first]
