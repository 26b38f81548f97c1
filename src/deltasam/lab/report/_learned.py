"""Whether a run has learned anything: against the largest class, and by its training loss."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from deltasam.lab.report._names import method_name
from deltasam.lab.report._runs import Run

_FEWEST = 8  # log entries; the loss of fewer is too noisy to tell
_FALL = 0.02  # of the loss, from the first to the last quarter of the entries
# Copies of constants of `deltasam.lab.experiments`, which imports torch.
_DATA, _LARGEST_CLASS = "data.json", "largest class"


def learning_problem(run: Run) -> str:
    """Returns why a run seems to have learned nothing, with what to try; an empty string if it has learned.

    Three signs count: the accuracy is less than one standard error above that of always answering the largest class;
    the metrics are those of one answer to every row; the training loss has not fallen.

    Args:
        run: A run of ``read_runs``.
    """
    found = _majority(run) or _constant(run) or _loss(run)
    return f"{found}; {_remedy(run)}" if found else ""


def learning_problems(runs: Iterable[Run]) -> list[str]:
    """Returns one sentence for each method with runs that seem to have learned nothing: how many, and why."""
    listed: dict[str, list[Run]] = {}
    for run in runs:
        listed.setdefault(run.method, []).append(run)
    found = []
    for method, each in listed.items():
        problems = {run.seed: problem for run in each if (problem := learning_problem(run))}
        if problems:
            seed, first = next(iter(problems.items()))
            count = "has" if len(each) == 1 else f"{len(problems)} of {len(each)} runs have"
            which = "" if len(each) == 1 else f" (seed {seed})"
            found.append(f"{method_name(method)}: {count} not learned{which}: {first}.")
    return found


def largest_class(run: Run) -> float | None:
    """Returns the share of the most frequent class of the rows that the run was evaluated on; None if unknown."""
    share = _read(run.path / _DATA).get(_LARGEST_CLASS)
    found = share.get(run.evaluation.split) if isinstance(share, dict) else None
    return float(found) if isinstance(found, (int, float)) else None


def _majority(run: Run) -> str:
    accuracy, share = run.metrics.get("accuracy"), largest_class(run)
    classes = len(run.result()["config"]["task"].get("classes") or ())
    if share is None and classes > 1 and not {"matthews", "f1"} & run.metrics.keys():  # they tell more, see below
        share, what = 1 / classes, f"guessing one of {classes} classes"
    else:
        what = "always answering the largest class"
    if accuracy is None or share is None:
        return ""
    rows = run.evaluation.rows or math.inf
    if accuracy > share + math.sqrt(share * (1 - share) / rows):
        return ""
    return f"the accuracy {accuracy:.4f} is no better than {what} ({share:.4f})"


def _constant(run: Run) -> str:
    """Returns the sign of one answer to every row, for runs whose largest class is not known."""
    accuracy, f1 = run.metrics.get("accuracy"), run.metrics.get("f1")
    is_one = accuracy is not None and f1 is not None and _is_f1_of_constant(f1, accuracy)
    return "it gives every row the same answer" if run.metrics.get("matthews") == 0 or is_one else ""


def _is_f1_of_constant(f1: float, accuracy: float) -> bool:
    """Whether F1 of class 1 is that of a constant answer with this accuracy: 0, or 2a / (1 + a)."""
    return f1 == 0 or math.isclose(f1, 2 * accuracy / (1 + accuracy), abs_tol=1e-4)


def _loss(run: Run) -> str:
    losses = [entry["loss"] for entry in run.log() if "loss" in entry]
    if len(losses) < _FEWEST or not all(map(math.isfinite, losses)):
        return ""
    quarter = len(losses) // 4
    first, last = fmean(losses[:quarter]), fmean(losses[-quarter:])
    if last < first - _FALL * abs(first):
        return ""
    return f"the training loss has hardly fallen ({first:.4g} at the start, {last:.4g} at the end)"


def _remedy(run: Run) -> str:
    settings = dict(run.settings)
    parts = [f"another optimizer.lr (now {settings['lr']:g})", f"more schedule.epochs (now {run.steps} updates)"]
    if settings.get("rho"):
        parts.append(f"a smaller method.rho (now {settings['rho']:g})")
    return f"try {', or '.join(parts)}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}
