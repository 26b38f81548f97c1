"""Which runs stand for a method on a task: repetitions of one configuration, the best one where there are several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean

from deltasam.report._runs import Run

Key = tuple[str, str, str]
"""Task, model, method."""

RULE = (
    "Where a method was run with several settings, the ones with the most seeds count, among them the best mean of "
    "the primary metric on the split that was evaluated."
)


def by_cell(runs: Iterable[Run], wanted: Callable[[Run], bool] = lambda run: True) -> dict[Key, list[Run]]:
    """The runs of the chosen variant of each (task, model, method), in the order of their seeds.

    Runs on a part of a split (``train[90%:]``) are left out: they chose the settings, on other rows. Where a method
    was run with several settings, those with the most seeds count, among them the ones with the best mean.

    Args:
        runs: Such as ``read_runs(folder).finished``.
        wanted: Which of them take part; all by default.

    Returns:
        (task, model, method) to its runs.
    """
    cells: dict[Key, dict[int, dict[int, Run]]] = {}
    for run in runs:
        if wanted(run) and not run.split.endswith("]"):
            cells.setdefault((run.task, run.model, run.method), {}).setdefault(run.variant, {})[run.seed] = run
    return {key: _chosen(list(variants.values())) for key, variants in cells.items()}


def _chosen(variants: list[dict[int, Run]]) -> list[Run]:
    most = max(map(len, variants))

    def quality(runs: dict[int, Run]) -> float:
        mean = fmean(run.metrics[run.primary] for run in runs.values())
        return mean if next(iter(runs.values())).higher_is_better else -mean

    best = max((runs for runs in variants if len(runs) == most), key=quality)
    return [best[seed] for seed in sorted(best)]
