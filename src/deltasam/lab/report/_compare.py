"""Compares methods: pooled paired tests with Holm's adjustment, and how often one wins."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from deltasam.lab.report._names import method_name, method_order
from deltasam.lab.report._statistics import Comparison, Wins, count_wins, holm, pooled_test
from deltasam.step.names import pluralized

Scores = Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]]
"""(model, method) -> column -> value by seed."""


def compare(scores: Scores, first: str, second: str, *, of_one_run: bool = False) -> tuple[Comparison, Wins] | None:
    """Compares two methods over all models and columns, paired by common seeds. Returns None if there is no pair.

    Args:
        scores: The values of all runs.
        first: The first method.
        second: The second method.
        of_one_run: Whether the columns are measures of the same runs, such as ROUGE-1 and ROUGE-2. The test then uses
            their mean, one pair per seed. Pooled as separate columns they would count as that many more runs.
    """
    pairs = _pairs(scores, first, second)
    tested = _pairs(_means_of_runs(scores), first, second) if of_one_run else pairs
    if not pairs or not tested:
        return None
    ours, theirs = ({cell: fmean(both[side]) for cell, both in pairs.items()} for side in (0, 1))
    return pooled_test(tested), count_wins(ours, theirs)


def comparison_notes(scores: Scores, *, of_one_run: bool = False, less_of: str = "") -> list[str]:
    """Describes every method against ERM, and delta-SAM against SAM: difference, Holm-adjusted p, wins.

    Args:
        scores: The values of all runs, in points; more is better.
        of_one_run: See :func:`compare`.
        less_of: A metric of which less is better. ``scores`` are then its values times -1.
    """
    methods = sorted({method for _, method in scores}, key=method_order)
    wanted = [(method, "ERM") for method in methods if method != "ERM"]
    wanted += [(f"DeltaSAM{end}", f"SAM{end}") for end in ("", "+EmbeddingNoise")]
    found = [
        (first, second, both)
        for first, second in wanted
        if (both := compare(scores, first, second, of_one_run=of_one_run)) is not None
    ]
    over = "columns" if of_one_run else "setups"
    adjusted = holm([test.p for _, _, (test, _) in found])
    return [
        f"{method_name(first)} − {method_name(second)}: {_difference(test, less_of)}, by mean better in {wins} "
        f"{over}; paired permutation test{'' if test.exact else ' (drawn)'} p = {test.p:.3g}, Holm {p:.3g} "
        f"({pluralized(test.pairs, 'pair')}; smallest possible p {test.smallest_p:.3g})."
        for (first, second, (test, wins)), p in zip(found, adjusted, strict=True)
    ]


def _difference(test: Comparison, less_of: str) -> str:
    return f"{-test.difference:+.3g} of {less_of} (less is better)" if less_of else f"{test.difference:+.2f} points"


def _means_of_runs(scores: Scores) -> Scores:
    """One column with the mean over all columns, for the seeds that every column has."""
    found = {}
    for key, columns in scores.items():
        seeds = set.intersection(*(set(values) for values in columns.values())) if columns else set()
        found[key] = {"mean": {seed: fmean(values[seed] for values in columns.values()) for seed in sorted(seeds)}}
    return found


def _pairs(scores: Scores, first: str, second: str) -> dict[str, tuple[list[float], list[float]]]:
    """The values of both methods for each model and column, in the order of their common seeds."""
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    for (model, method), columns in scores.items():
        if method == first:
            for column, values in columns.items():
                others = scores.get((model, second), {}).get(column, {})
                seeds = [seed for seed in values if seed in others]
                if seeds:
                    pairs[f"{model} {column}"] = [values[s] for s in seeds], [others[s] for s in seeds]
    return pairs
