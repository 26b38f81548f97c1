"""Measurements that stay in the folder of a run, for the tables and the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from deltasam.experiments._folder import RunFolder, write

RISK = "adversarial-risk.json"


def record_risk(
    folder: Path,
    *,
    rho: float = 0.05,
    rows: int = 256,
    steps: int = 1,
    batch_size: int = 16,
    split: str | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """Adversarial risk (the paper's Table 4) of a run's final weights, kept in ``analysis/adversarial-risk.json``.

    Args:
        folder: The run folder, with weights.
        rho: Radius; the paper's is 0.05 for all methods.
        rows: A fixed random sample of so many rows.
        steps: Ascent steps inside the ball; the paper's is 1.
        batch_size: Instances per batch.
        split: The split; the one the run evaluates on by default.
        data: Folder with the datasets, if it is not where the run had it.

    Returns:
        What was written; it is not measured again if the same is there already.

    Raises:
        ConfigError: The folder holds no finished run.
        DataError: The data is missing.
    """
    wanted = {"rho": rho, "rows": rows, "steps": steps, "split": split}
    known = measured(folder, RISK)
    if known is not None and known["settings"] == wanted:
        return known
    from deltasam.analysis import adversarial_risk
    from deltasam.experiments._load import load_run

    _, loaded = load_run(folder, split=split, rows=rows, data=data)
    risk = adversarial_risk(loaded.model, loaded.batches(batch_size), loaded.objective, rho=rho, steps=steps)
    found: dict[str, Any] = {
        "settings": wanted,
        "value": float(risk.value),
        "loss": float(risk.clean),
        "measured": len(risk.losses),
    }
    if not math.isfinite(found["value"]):
        raise ValueError(f"{folder}: the adversarial risk is {found['value']}; the run has diverged")
    place = RunFolder(folder).path / "analysis"
    place.mkdir(exist_ok=True)
    write(place / RISK, json.dumps(found, indent=1))
    return found


def measured(folder: Path, name: str) -> dict[str, Any] | None:
    """What is in ``analysis/<name>`` of a run folder, or None."""
    try:
        found: dict[str, Any] = json.loads((folder / "analysis" / name).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return found
