"""Made-up runs of the comparisons on ``docs/results``: models, conditions, radii, rounded weights, reliability."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_evidence(
    folder: Path,
    task: str,
    method: str | dict[str, Any] = "ERM",
    *,
    seed: int,
    score: float,
    model: str = "bert-small-wiki",
    primary: str = "accuracy",
    regulariser: str | None = None,
    average: str | None = None,
    lora: bool = False,
    reliability: dict[str, list[list[float]]] | None = None,
    metrics: dict[str, float] | None = None,
    **options: Any,
) -> Path:
    """Writes one result.json and returns its folder. ``options`` are those of the task, such as ``label_noise``."""
    own = {"name": method} if isinstance(method, str) else method
    parts = [own["name"], *filter(None, (regulariser, average and average.upper()))]
    config = {
        "task": {"name": task, "eval_split": "validation", "train_rows": None, **options},
        "model": {"path": model, "lora": {"r": 16} if lora else None}, "method": own,
        "regularisers": [{"name": regulariser}] if regulariser else [],
        "average": {"kind": average, "decay": 0.99} if average else None,
        "optimizer": {"lr": 1e-4}, "schedule": {"epochs": 3, "steps": None}, "seed": seed,
    }  # fmt: skip
    place = folder / f"run-{len(list(folder.glob('run-*'))) if folder.is_dir() else 0}"
    place.mkdir(parents=True)
    result = {
        "run_id": str(place), "task": task, "model": model, "method": "+".join(parts), "seed": seed,
        "primary_metric": primary, "higher_is_better": True, "best_value": score,
        "metrics": {primary: score, **(metrics or {})}, "steps": 10, "eval_rows": 100, "train_seconds": 1.0,
        "forward_passes": 10, "backward_passes": 10, "peak_memory_bytes": 1, "device": "cpu", "config": config,
    }  # fmt: skip
    if reliability:
        result["reliability"] = reliability
    (place / "result.json").write_text(json.dumps(result))
    return place


def table_rows(text: str) -> dict[str, list[str]]:
    """The rows of a table in Markdown: first cell -> the others."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {line[0]: line[1:] for line in lines}
