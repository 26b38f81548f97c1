"""Compares methods: pooled paired tests with Holm's adjustment, and how often one wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import NamedTuple

from deltasam.lab.report._names import method_name, method_order
from deltasam.lab.report._statistics import Comparison, Wins, count_wins, holm, pooled_test
from deltasam.step.names import pluralized

_TEST = "paired permutation test"

Scores = Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]]
"""(model, method) -> column -> value by seed."""


Fair = Callable[[str, str, str, str], bool]
"""Whether model, column, first and second method may be compared."""


def compare(
    scores: Scores, first: str, second: str, *, of_one_run: bool = False, fair: Fair = lambda *_: True
) -> tuple[Comparison, Wins] | None:
    """Compares two methods over all models and columns, paired by common seeds. Returns None if there is no pair.

    Args:
        scores: The values of all runs.
        first: The first method.
        second: The second method.
        of_one_run: Whether the columns are measures of the same runs, such as ROUGE-1 and ROUGE-2. The test then uses
            their mean, one pair per seed. Pooled as separate columns they would count as that many more runs.
        fair: Which of the pairs count.
    """
    pairs = _pairs(scores, first, second, fair)
    tested = _pairs(_means_of_runs(scores), first, second, fair) if of_one_run else pairs
    if not pairs or not tested:
        return None
    ours, theirs = ({cell: fmean(both[side]) for cell, both in pairs.items()} for side in (0, 1))
    return pooled_test(tested), count_wins(ours, theirs)


class Test(NamedTuple):
    """A paired test of two methods over all their setups."""

    first: str  #: Method.
    second: str  #: The method that it is compared to.
    outcome: Comparison  #: Difference and p.
    wins: Wins  #: In how many setups the first is better by its mean.
    adjusted: float  #: p after Holm's adjustment for all tests made together.


def comparison_tests(scores: Scores, *, of_one_run: bool = False, fair: Fair = lambda *_: True) -> list[Test]:
    """Tests every method against ERM, and delta-SAM against SAM.

    Args:
        scores: The values of all runs; more is better.
        of_one_run: See :func:`compare`.
        fair: See :func:`compare`.
    """
    methods = sorted({method for _, method in scores}, key=method_order)
    wanted = [(method, "ERM") for method in methods if method != "ERM"]
    wanted += [(f"DeltaSAM{end}", f"SAM{end}") for end in ("", "+EmbeddingNoise")]
    found = [
        (first, second, both)
        for first, second in wanted
        if (both := compare(scores, first, second, of_one_run=of_one_run, fair=fair)) is not None
    ]
    adjusted = holm([test.p for _, _, (test, _) in found])
    return [Test(first, second, *both, p) for (first, second, both), p in zip(found, adjusted, strict=True)]


def comparison_notes(scores: Scores, *, of_one_run: bool = False, less_of: str = "") -> list[str]:
    """Describes the tests of :func:`comparison_tests`, one sentence each.

    Args:
        scores: The values of all runs, in points; more is better.
        of_one_run: See :func:`compare`.
        less_of: A metric of which less is better. ``scores`` are then its values times -1.
    """
    over = "columns" if of_one_run else "setups"
    return [
        f"{method_name(first)} − {method_name(second)}: {_difference(test, less_of)}, by mean better in {wins} "
        f"{over}; {_TEST}{'' if test.exact else ' (drawn)'} p = {test.p:.3g}, Holm {p:.3g} "
        f"({pluralized(test.pairs, 'pair')}; smallest possible p {test.smallest_p:.3g})."
        for first, second, test, wins, p in comparison_tests(scores, of_one_run=of_one_run)
    ]


def is_test(note: str) -> bool:
    """Whether a note is a sentence of :func:`comparison_notes`. The page has a table of the tests instead."""
    return f"; {_TEST}" in note


def _difference(test: Comparison, less_of: str) -> str:
    return f"{-test.difference:+.3g} of {less_of} (less is better)" if less_of else f"{test.difference:+.2f} points"


def _means_of_runs(scores: Scores) -> Scores:
    """One column with the mean over all columns, for the seeds that every column has."""
    found = {}
    for key, columns in scores.items():
        seeds = set.intersection(*(set(values) for values in columns.values())) if columns else set()
        found[key] = {"mean": {seed: fmean(values[seed] for values in columns.values()) for seed in sorted(seeds)}}
    return found


def _pairs(scores: Scores, first: str, second: str, fair: Fair) -> dict[str, tuple[list[float], list[float]]]:
    """The values of both methods for each model and column, in the order of their common seeds."""
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    for (model, method), columns in scores.items():
        if method == first:
            for column, values in columns.items():
                others = scores.get((model, second), {}).get(column, {})
                seeds = [seed for seed in values if seed in others]
                if seeds and fair(model, column, first, second):
                    pairs[f"{model} {column}"] = [values[s] for s in seeds], [others[s] for s in seeds]
    return pairs
