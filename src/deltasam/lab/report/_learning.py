"""Recognises runs that learned nothing: one class for every row, guessing, or a loss that never fell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

_FALL = 0.01  # a training loss that falls by less than this share has not fallen

_ONE_SIDED = 1.645  # standard errors; 95% of the accuracies of guesses are below


def learning_problem(result: Mapping[str, Any], log: Sequence[Mapping[str, float]] = ()) -> str:
    """Returns why a run has learned nothing, or an empty text.

    Constant predictions are recognised exactly: Matthews' correlation is 0, or accuracy and F1 are those of the
    majority class. Where neither metric is there, an accuracy that guessing reaches in 5% of cases counts.

    Args:
        result: The content of ``result.json``.
        log: The entries of ``metrics.jsonl`` with the training loss, as far as there are any.

    Example:
        >>> config = {"task": {"classes": ["no", "yes"]}}
        >>> learning_problem({"metrics": {"accuracy": 0.684, "f1": 0.8123}, "eval_rows": 408, "config": config})
        'predicts one class for every row'
    """
    metrics, task = result["metrics"], result["config"]["task"]
    classes = len(task.get("classes") or ())
    accuracy = metrics.get("accuracy")
    if metrics.get("matthews") == 0 or (classes == 2 and _is_constant(accuracy, metrics.get("f1"))):
        return "predicts one class for every row"
    rows = result.get("eval_rows") or 0
    if accuracy is not None and classes > 1 and rows and not {"matthews", "f1"} & metrics.keys():
        guess = 1 / classes
        if accuracy <= guess + _ONE_SIDED * math.sqrt(guess * (1 - guess) / rows):
            return f"no better than guessing one of {classes} classes"
    first, last = _ends([entry["loss"] for entry in log if "loss" in entry])
    if last > (1 - _FALL) * first:
        return f"the training loss never fell ({first:.3g} at the start, {last:.3g} at the end)"
    return ""


def _is_constant(accuracy: float | None, f1: float | None) -> bool:
    """Whether accuracy and F1 of class 1 are those of a constant: F1 is 0, or 2a / (1 + a) for the accuracy a."""
    if accuracy is None or f1 is None:
        return False
    return f1 == 0 or math.isclose(f1, 2 * accuracy / (1 + accuracy), abs_tol=1e-4)


def _ends(losses: Sequence[float]) -> tuple[float, float]:
    """The mean loss of the first and the last fifth of a log; infinity and 0 where it is too short to say."""
    if len(losses) < 4 or not all(map(math.isfinite, losses)):
        return math.inf, 0.0
    count = max(1, len(losses) // 5)
    return fmean(losses[:count]), fmean(losses[-count:])
