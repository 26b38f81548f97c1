"""Which runs stand for a method on a task: repetitions of one configuration, evaluated alike, the best of several."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean

from deltasam.lab.report._evaluation import STANDARD, Evaluation, preference, same_kind, usual, words
from deltasam.lab.report._names import short_models
from deltasam.lab.report._runs import Run
from deltasam.step.names import counted

Key = tuple[str, str, str]
"""Task, model, method."""

RULE = (
    "Where a method was run with several settings, the ones with the most seeds count, among them the best mean of "
    "the primary metric on the split that was evaluated."
)


@dataclass(frozen=True)
class Selection:
    """The runs of a table: those of one task and one model were all evaluated alike.

    Attributes:
        cells: (task, model, method) to its runs, in the order of their seeds.
        unusual: (task, model) to how it was evaluated, where that is not the task's standard.
        left_out: What was left out, since it was evaluated otherwise than the cells; a note, or nothing.
    """

    cells: dict[Key, list[Run]]
    unusual: dict[tuple[str, str], str]
    left_out: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the stars in the cells mean, and what was left out."""
        if not self.unusual:
            return self.left_out
        short = short_models(model for _, model in self.unusual)
        told = "; ".join(f"{task} with {short[model]} {how}" for (task, model), how in self.unusual.items())
        return f"* Not the standard evaluation of the task: {told}.", *self.left_out


def by_cell(runs: Iterable[Run], wanted: Callable[[Run], bool] = lambda run: True) -> dict[Key, list[Run]]:
    """The runs of the chosen variant of each (task, model, method), in the order of their seeds.

    Runs on a part of a split (``train[90%:]``) are left out: they chose the settings, on other rows. Where a method
    was run with several settings, those with the most seeds count, among them the ones with the best mean. Runs that
    were evaluated otherwise than is usual for their task (a sample of the rows, another split or metric) are cells of
    their own, and the name of the task says it: ``mrpc (on a sample of 20 rows)``.

    Args:
        runs: Such as ``read_runs(folder).finished``.
        wanted: Which of them take part; all by default.

    Returns:
        (task, model, method) to its runs; the model by its whole path.
    """
    kept = [run for run in runs if wanted(run) and not run.evaluation.is_part]
    standard = usual((run.task, run.evaluation) for run in kept)
    told = {(run.task, run.evaluation): words(run.evaluation, standard[run.task]) for run in kept}
    names = {one: f"{one[0]} ({how})" if how else one[0] for one, how in told.items()}
    return _cells(kept, lambda run: names[run.task, run.evaluation])


def select(runs: Iterable[Run], wanted: Callable[[Run], bool] = lambda run: True, *, strict: bool = True) -> Selection:
    """The runs of each (task, model, method), evaluated in one way for each task and model: the standard one.

    Where there is no such run, those on some of the rows, or on rows of another number, take its place and are
    labelled.

    Args:
        runs: Such as ``read_runs(folder).finished``.
        wanted: Which of them take part; all by default.
        strict: Whether another split, metric or dataset than the standard ones of the paper's tasks is never shown.
    """
    kept = [run for run in runs if wanted(run)]
    standard = usual((run.task, run.evaluation) for run in kept)
    labels = {one: words(one[1], standard[one[0]]) for one in {(run.task, run.evaluation) for run in kept}}
    chosen = _evaluations(kept, standard, strict=strict)
    unusual = {key: told for key, one in sorted(chosen.items()) if (told := labels[key[0], one])}
    inside: list[Run] = []
    left: Counter[str] = Counter()
    for run in kept:
        told, one = labels[run.task, run.evaluation], chosen.get((run.task, run.model))
        if one is not None and labels[run.task, one] == told:
            inside.append(run)
        else:
            left[told] += 1
    return Selection(_cells(inside, lambda run: run.task), unusual, _left_out(left))


def _evaluations(
    runs: list[Run], standard: dict[str, Evaluation], *, strict: bool
) -> dict[tuple[str, str], Evaluation]:
    """The one evaluation of each task and model: the standard one if there is any such run."""
    counts: dict[tuple[str, str], Counter[Evaluation]] = {}
    for run in runs:
        fits = same_kind(run.evaluation, standard[run.task]) or not (strict and run.task in STANDARD)
        if fits and not run.evaluation.is_part:
            counts.setdefault((run.task, run.model), Counter())[run.evaluation] += 1
    return {
        key: max(times, key=lambda one: (not words(one, standard[key[0]]), *preference(one, times[one])))
        for key, times in counts.items()
    }


def _left_out(counts: Counter[str]) -> tuple[str, ...]:
    if not counts:
        return ()
    told = "; ".join(f"{counted(count, 'run')} {how}" for how, count in sorted(counts.items()))
    return (f"Left out, since they were evaluated otherwise: {told}.",)


def _cells(runs: Iterable[Run], task: Callable[[Run], str]) -> dict[Key, list[Run]]:
    cells: dict[Key, dict[int, dict[int, Run]]] = {}
    for run in runs:
        cells.setdefault((task(run), run.model, run.method), {}).setdefault(run.variant, {})[run.seed] = run
    return {key: _chosen(list(variants.values())) for key, variants in cells.items()}


def _chosen(variants: list[dict[int, Run]]) -> list[Run]:
    most = max(map(len, variants))

    def quality(runs: dict[int, Run]) -> float:
        """The mean; what is not finite comes last, whatever NaN compares to."""
        mean = fmean(run.metrics[run.primary] for run in runs.values())
        if not math.isfinite(mean):
            return -math.inf
        return mean if next(iter(runs.values())).higher_is_better else -mean

    best = max((runs for runs in variants if len(runs) == most), key=quality)
    return [best[seed] for seed in sorted(best)]
