"""The conditions of a run: everything but the method and the seed that can change its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from sys import intern
from typing import Any

# Options that choose what is measured, or where, and leave the trained weights as they are.
_NOT_TRAINING = frozenset({
    "task.name", "task.metrics", "task.eval_split", "task.eval_rows", "task.evaluate_on", "task.bits", "task.general",
    "task.general_rows", "task.general_length", "task.train_rows", "model.path", "batch.eval_size",
})  # fmt: skip
_SECTIONS = ("task", "model", "optimizer", "schedule", "batch")
_NAMES = {
    "optimizer.lr": "learning rate", "schedule.epochs": "epochs", "schedule.steps": "updates",
    "batch.size": "batch size", "task.label_noise": "label noise", "task.rows": "sampled rows", "model.lora": "LoRA",
}  # fmt: skip

MAIN = ("learning rate", "epochs", "updates", "batch size", "training rows", "precision", "LoRA")
"""The conditions that a reader wants to see first."""

Conditions = tuple[tuple[str, str], ...]
"""Names and values. An option that is unset, empty or 0 is absent, so that a run from before the option compares."""


def conditions_of(result: Mapping[str, Any]) -> Conditions:
    """Returns the conditions of a result, with the names that the page shows.

    Example:
        >>> config = {"optimizer": {"lr": 1e-4}, "batch": {"size": 32}, "precision": "tf32", "model": {"lora": None}}
        >>> conditions_of({"config": config, "train_rows": 3668})
        (('learning rate', '0.0001'), ('batch size', '32'), ('training rows', '3668'), ('precision', 'tf32'))
    """
    config = result["config"]
    found = {}
    for section in _SECTIONS:
        for name, value in (config.get(section) or {}).items():
            key = f"{section}.{name}"
            if value and key not in _NOT_TRAINING:
                found[_NAMES.get(key, key)] = _text(value)
    if "updates" in found:  # they take precedence
        found.pop("epochs", None)
    found |= {"training rows": str(result.get("train_rows") or ""), "precision": str(config.get("precision") or "")}
    return _shared(tuple(item for item in found.items() if item[1]))


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_text(inner)}" for name, inner in value.items() if inner)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


@cache
def _shared(conditions: Conditions) -> Conditions:
    """One object for equal conditions: thousands of runs share a few of them."""
    return tuple((intern(name), intern(value)) for name, value in conditions)
