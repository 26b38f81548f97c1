"""Measurements that stay in the folder of a run, for the tables and the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from deltasam.lab.experiments._errors import ConfigError, DivergedError
from deltasam.lab.experiments._folder import write

RISK = "adversarial-risk.json"
WEIGHTS = "instance-weights.json"


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
        DivergedError: The risk is not finite.
    """
    wanted = risk_settings(rho=rho, rows=rows, steps=steps, split=split)
    known = measured(folder, RISK)
    if known is not None and known["settings"] == wanted:
        return known
    from deltasam.analysis import adversarial_risk
    from deltasam.lab.experiments._load import load_run

    _, loaded = load_run(folder, split=split, rows=rows, data=data)
    risk = adversarial_risk(loaded.model, loaded.batches(batch_size), loaded.objective, rho=rho, steps=steps)
    found: dict[str, Any] = {
        "settings": wanted,
        "value": float(risk.value),
        "loss": float(risk.clean),
        "measured": len(risk.losses),
    }
    if not math.isfinite(found["value"]):
        raise DivergedError(f"{folder}: the adversarial risk is {found['value']}; the run has diverged")
    _keep(folder, RISK, json.dumps(found, indent=1))
    return found


def risk_settings(
    *, rho: float = 0.05, rows: int = 256, steps: int = 1, split: str | None = None, **_: Any
) -> dict[str, Any]:
    """Those of the options of :func:`record_risk` that decide what comes out."""
    return {"rho": rho, "rows": rows, "steps": steps, "split": split}


def is_measured(folder: Path, **options: Any) -> bool:
    """Whether the adversarial risk with these options is there; one with others does not count."""
    known = measured(folder, RISK)
    return known is not None and known.get("settings") == risk_settings(**options)


def measured(folder: Path, name: str) -> dict[str, Any] | None:
    """What is in ``analysis/<name>`` of a run folder; None if it is not there, or was cut short or altered."""
    try:
        found = json.loads((folder / "analysis" / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "settings" in found else None


def record_weights(
    folder: Path, *, rows: int = 256, batch_size: int = 16, most: int = 10, data: str | None = None
) -> dict[str, Any]:
    """The weights g that the run's method gives to the instances at its final weights, and who gets most and least.

    Kept in ``analysis/instance-weights.json``, with the texts of those instances.

    Args:
        folder: The run folder, with weights; its method must weigh instances, as delta-SAM does.
        rows: A fixed random sample of so many rows of the split that the run evaluates on.
        batch_size: Instances per batch; weights are relative to their batch.
        most: So many of the heaviest and of the lightest instances are kept.
        data: Folder with the datasets, if it is not where the run had it.

    Returns:
        What was written.

    Raises:
        ConfigError: The folder holds no finished run, or its method has no weights.
    """
    from deltasam.lab.experiments._load import load_run
    from deltasam.step.batches import tree_map

    config, loaded = load_run(folder, rows=rows, data=data)
    method = config.method
    if getattr(method, "probe_every", 1) != 1:
        method = method.replace(probe_every=1)  # of its steps only some weigh
    weights: list[float] = []
    for batch in loaded.batches(batch_size):
        on_device = tree_map(lambda leaf: leaf.to(loaded.model.device) if hasattr(leaf, "to") else leaf, batch)
        step = method.backward(loaded.model, on_device, loaded.objective)
        if step.weights is None:
            raise ConfigError(f"{folder}: {type(method).__name__} does not weigh instances; DeltaSAM does")
        weights += step.weights.tolist()
        loaded.model.zero_grad(set_to_none=True)
    ranked = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = list(dict.fromkeys(ranked[:most] + ranked[-most:]))
    examples = [{"weight": weights[i], "rank": ranked.index(i) + 1, "text": _text(loaded.rows[i])} for i in kept]
    found = {"settings": {"rows": rows, "batch_size": batch_size}, "weights": sorted(weights), "examples": examples}
    _keep(folder, WEIGHTS, json.dumps(found, ensure_ascii=False))
    return found


def _keep(folder: Path, name: str, text: str) -> None:
    (folder / "analysis").mkdir(exist_ok=True)
    write(folder / "analysis" / name, text)


def _text(row: dict[str, Any]) -> str:
    return " ⏐ ".join(f"{name}: {value}" for name, value in row.items())
