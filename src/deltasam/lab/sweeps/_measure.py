"""Measurements at the final weights, stored in the run folder for tables and the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from deltasam.integrations.storage import write_text
from deltasam.lab.experiments import ConfigError, DivergedError, load_run
from deltasam.lab.sweeps._file import Risk

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
    """Measures the adversarial risk (the paper's Table 4) and stores it in ``analysis/adversarial-risk.json``.

    Args:
        folder: The run folder, with weights.
        rho: Radius; 0.05 for all methods in the paper.
        rows: Size of a fixed random sample of the split.
        steps: Ascent steps inside the ball; 1 in the paper.
        batch_size: Instances per batch.
        split: The split; by default the one that the run evaluates on.
        data: Folder with the datasets, if it has moved since the run.

    Returns:
        The content of the file; an existing one with the same settings is not measured again.

    Raises:
        ConfigError: The folder does not hold a finished run.
        DataError: The data is missing.
        DivergedError: The risk is not finite.
    """
    settings = {"rho": rho, "rows": rows, "steps": steps, "split": split}
    known = measured(folder, RISK)
    if known is not None and known["settings"] == settings:
        return known
    from deltasam.analysis import adversarial_risk

    _, loaded = load_run(folder, split=split, rows=rows, data=data)
    risk = adversarial_risk(loaded.model, loaded.batches(batch_size), loaded.objective, rho=rho, steps=steps)
    value = float(risk.value)
    if not math.isfinite(value):
        raise DivergedError(f"{folder}: the adversarial risk is {value}; the run has diverged")
    found = {"settings": settings, "value": value, "loss": float(risk.clean), "measured": len(risk.losses)}
    _store(folder, RISK, json.dumps(found, indent=1))
    return found


def is_measured(folder: Path, **options: Any) -> bool:
    """Whether the adversarial risk has been measured with these options of :func:`record_risk`."""
    known, risk = measured(folder, RISK), Risk(**options)
    settings = {"rho": risk.rho, "rows": risk.rows, "steps": risk.steps, "split": risk.split}
    return known is not None and known["settings"] == settings


def measured(folder: Path, name: str) -> dict[str, Any] | None:
    """Returns the content of ``analysis/<name>`` of a run folder; None if it is missing or damaged."""
    try:
        found = json.loads((folder / "analysis" / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "settings" in found else None


def record_weights(
    folder: Path,
    *,
    rows: int = 256,
    batch_size: int = 16,
    most: int = 10,
    split: str | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """Measures the weights g that the method gives to instances at the final weights of the run.

    They are stored in ``analysis/instance-weights.json``, with the texts of the largest and smallest weights. For
    training rows with wrong labels (``task.label_noise``), ``wrong_labels`` has the mean weight of these and of the
    others, relative to the mean of their batch.

    Args:
        folder: The run folder, with weights; its method must weight instances, as delta-SAM does.
        rows: Size of a fixed random sample of the split.
        batch_size: Instances per batch; weights are relative to their batch.
        most: Number of texts stored at each end.
        split: The split; by default the one that the run evaluates on.
        data: Folder with the datasets, if it has moved since the run.

    Returns:
        The content of the file.

    Raises:
        ConfigError: The folder does not hold a finished run, or its method does not weight instances.
    """
    from deltasam.step.batches import tree_map

    config, loaded = load_run(folder, split=split, rows=rows, data=data)
    method = config.method
    if getattr(method, "probe_every", 1) != 1:
        method = method.replace(probe_every=1)  # weights in every step
    kept_rows = loaded.task.encoded_rows(loaded.rows, loaded.tokenizer)
    weights: list[float] = []
    relative: list[float] = []
    for batch in loaded.batches(batch_size):
        on_device = tree_map(lambda leaf: leaf.to(loaded.model.device) if hasattr(leaf, "to") else leaf, batch)
        step = method.backward(loaded.model, on_device, loaded.objective)
        if step.weights is None:
            raise ConfigError(f"{folder}: {type(method).__name__} does not weight instances; DeltaSAM does")
        weights += step.weights.tolist()
        relative += (step.weights / step.weights.mean()).tolist()
        loaded.model.zero_grad(set_to_none=True)
    ranked = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = list(dict.fromkeys(ranked[:most] + ranked[-most:]))
    examples = [{"weight": weights[i], "rank": ranked.index(i) + 1, "text": _text(kept_rows[i])} for i in kept]
    settings = {"rows": rows, "batch_size": batch_size, **({} if split is None else {"split": split})}
    found = {"settings": settings, "weights": sorted(weights), "examples": examples}
    wrong = ["clean_label" in row for row in kept_rows]
    if any(wrong) and not all(wrong):
        means = [fmean(g for g, is_wrong in zip(relative, wrong, strict=True) if is_wrong == one) for one in (1, 0)]
        found["wrong_labels"] = {"count": sum(wrong), "weight": means[0], "others": means[1]}
    _store(folder, WEIGHTS, json.dumps(found, ensure_ascii=False))
    return found


def _store(folder: Path, name: str, text: str) -> None:
    (folder / "analysis").mkdir(exist_ok=True)
    write_text(folder / "analysis" / name, text)


def _text(row: dict[str, Any]) -> str:
    return " ⏐ ".join(f"{name}: {value}" for name, value in row.items())
