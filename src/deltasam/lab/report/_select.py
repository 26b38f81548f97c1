"""Chooses the runs of each cell: repetitions of one configuration with the same evaluation, the best of several."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean

from deltasam.lab.report._evaluation import STANDARD, Evaluation, preference, usual
from deltasam.lab.report._names import short_models
from deltasam.lab.report._runs import Run
from deltasam.step.names import pluralized

Key = tuple[str, str, str]
"""Task, model, method."""
Cells = dict[Key, list[Run]]
"""The runs of each cell, sorted by seed."""

RULE = (
    "Where a method was run with several settings, the ones with the most seeds count, among them the best mean of "
    "the primary metric on the split that was evaluated."
)


@dataclass(frozen=True)
class Selection:
    """The runs of a table. All runs of one task and model have the same evaluation."""

    cells: Cells  #: (task, model, method) to its runs.
    unusual: dict[tuple[str, str], str]  #: (task, model) to its evaluation, where that is not the standard one.
    left_out: tuple[str, ...]  #: Notes on the runs with another evaluation or altered data.

    @property
    def notes(self) -> tuple[str, ...]:
        """Explains the stars in the cells and the runs left out."""
        if not self.unusual:
            return self.left_out
        short = short_models(model for _, model in self.unusual)
        starred = "; ".join(f"{task} with {short[model]} {how}" for (task, model), how in self.unusual.items())
        return f"* Not the standard evaluation of the task: {starred}.", *self.left_out


def by_cell(runs: Iterable[Run]) -> Cells:
    """Returns the runs of the chosen variant of each (task, model, method), sorted by seed.

    Runs on a part of a split (``train[90%:]``) are left out: they chose the settings. If a method was run with several
    settings, those with the most seeds count, among them the ones with the best mean. Runs with an unusual evaluation
    (a sample of the rows, another split or metric) get their own cells, named ``mrpc (on a sample of 20 rows)``, and
    so do runs on altered training data.

    Args:
        runs: Such as ``read_runs(folder).finished``. Keys have the full path of the model.
    """
    return {key: best_variant(variants) for key, variants in by_variant(runs).items()}


def by_variant(runs: Iterable[Run]) -> dict[Key, list[list[Run]]]:
    """Returns the runs of every variant of each (task, model, method) of :func:`by_cell`, sorted by seed.

    Runs on altered data (label noise, a sample of the training rows) and with adapters get their own cells.
    """
    kept = [run for run in runs if not run.evaluation.is_part]
    standard = usual((run.task, run.evaluation) for run in kept)
    sizes = defaultdict(set)
    for run in kept:
        sizes[run.task, run.data].add(run.train_rows)

    def task(run: Run) -> str:
        size = [f"{run.train_rows} training rows"] if len(sizes[run.task, run.data]) > 1 and run.train_rows else []
        how = [*(run.data or size), run.evaluation.difference(standard[run.task])]
        return f"{run.task} ({', '.join(filter(None, how))})" if any(how) else run.task

    return _variants(kept, task, lambda run: f"{run.model}, LoRA" if "LoRA" in dict(run.conditions) else run.model)


def select(runs: Iterable[Run], wanted: Callable[[Run], bool] = lambda run: True, *, strict: bool = True) -> Selection:
    """Selects the runs of each (task, model, method) with one evaluation per task and model: the standard one.

    If there is no such run, runs on a sample or on another number of rows take its place and are marked. ``strict``
    requires the standard split, metric and dataset for the paper's tasks.
    """
    given = [run for run in runs if wanted(run)]
    kept = [run for run in given if not run.data]
    standard = usual((run.task, run.evaluation) for run in kept)
    labels = {(run.task, run.evaluation): run.evaluation.difference(standard[run.task]) for run in kept}
    chosen = _evaluations(kept, standard, strict=strict)
    unusual = {key: how for key, one in sorted(chosen.items()) if (how := labels[key[0], one])}

    def fits(run: Run) -> bool:
        one = chosen.get((run.task, run.model))
        return one is not None and labels[run.task, one] == labels[run.task, run.evaluation]

    left = Counter(labels[run.task, run.evaluation] for run in kept if not fits(run))
    altered = Counter(f"with {', '.join(run.data)}" for run in given if run.data)
    left_out = tuple(
        f"Left out because of {why}: "
        + "; ".join(f"{pluralized(count, 'run')} {how}" for how, count in sorted(found.items()))
        + "."
        for why, found in (("another evaluation", left), ("altered training data", altered))
        if found
    )
    return Selection(_cells(filter(fits, kept), lambda run: run.task), unusual, left_out)


def _evaluations(
    runs: list[Run], standard: dict[str, Evaluation], *, strict: bool
) -> dict[tuple[str, str], Evaluation]:
    """The one evaluation of each task and model: the standard one if there is such a run."""
    counts: dict[tuple[str, str], Counter[Evaluation]] = {}
    for run in runs:
        fits = run.evaluation.is_like(standard[run.task]) or not (strict and run.task in STANDARD)
        if fits and not run.evaluation.is_part:
            counts.setdefault((run.task, run.model), Counter())[run.evaluation] += 1
    return {
        key: max(times, key=lambda one: (not one.difference(standard[key[0]]), *preference(one, times[one])))
        for key, times in counts.items()
    }


def _cells(runs: Iterable[Run], task: Callable[[Run], str]) -> Cells:
    return {key: best_variant(found) for key, found in _variants(runs, task, lambda run: run.model).items()}


def _variants(
    runs: Iterable[Run], task: Callable[[Run], str], model: Callable[[Run], str]
) -> dict[Key, list[list[Run]]]:
    cells: dict[Key, dict[int, dict[int, Run]]] = {}
    for run in runs:
        cells.setdefault((task(run), model(run), run.method), {}).setdefault(run.variant, {})[run.seed] = run
    return {
        key: [[found[seed] for seed in sorted(found)] for found in variants.values()]
        for key, variants in cells.items()
    }


def best_variant(variants: list[list[Run]]) -> list[Run]:
    """Returns the variant with the most seeds, among those the one with the best mean."""
    return max(variants, key=_quality)


def _quality(runs: list[Run]) -> tuple[int, float]:
    return len(runs), fmean(run.score if run.higher_is_better else -run.score for run in runs)
