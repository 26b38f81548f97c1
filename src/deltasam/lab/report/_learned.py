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

    Two signs count: the accuracy is less than one standard error above that of always answering the largest class, or
    the training loss has not fallen. The files of the run folder have all that is needed.

    Args:
        run: A run of ``read_runs``.
    """
    found = _majority(run) or _loss(run)
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
    if accuracy is None or share is None:
        return ""
    rows = run.evaluation.rows or math.inf
    if accuracy > share + math.sqrt(share * (1 - share) / rows):
        return ""
    return f"the accuracy {accuracy:.4f} is not clearly above that of always answering the largest class ({share:.4f})"


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
