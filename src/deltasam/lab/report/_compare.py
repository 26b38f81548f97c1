"""Methods against each other in words: pooled paired tests with Holm, and how often one wins."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from deltasam.lab.report._names import method_name, method_order
from deltasam.lab.report._tests import Comparison, holm, pooled_test
from deltasam.lab.report._wins import Wins, count_wins
from deltasam.step.names import counted

Scores = Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]]
"""(model, method) -> column -> value by seed."""


def compare(scores: Scores, first: str, second: str, *, of_one_run: bool = False) -> tuple[Comparison, Wins] | None:
    """Two methods over all models and columns, paired by the seeds that both have; None if there is no pair.

    Args:
        scores: The values of every run.
        first: A method,
        second: and another.
        of_one_run: The columns are measures of the same runs, such as ROUGE-1 and ROUGE-2, not runs of their own: what
            is tested is their mean, one pair per seed. Counted one by one they would look like so many more runs.
    """
    pairs = _pairs(scores, first, second)
    if not pairs:
        return None
    means = [{cell: fmean(both[side]) for cell, both in pairs.items()} for side in (0, 1)]
    tested = _pairs(_means_of_runs(scores), first, second) if of_one_run else pairs
    return (pooled_test(tested), count_wins(means[0], means[1])) if tested else None


def _means_of_runs(scores: Scores) -> Scores:
    """One column, the mean over all, of the seeds that every column has."""
    found = {}
    for key, columns in scores.items():
        seeds = set.intersection(*(set(values) for values in columns.values())) if columns else set()
        found[key] = {"mean": {seed: fmean(values[seed] for values in columns.values()) for seed in sorted(seeds)}}
    return found


def _pairs(scores: Scores, first: str, second: str) -> dict[str, tuple[list[float], list[float]]]:
    """Model and column -> the values of both methods, by common seed."""
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    for (group, method), columns in scores.items():
        other = scores.get((group, second), {})
        if method == first:
            for column, values in columns.items():
                seeds = [seed for seed in values if seed in other.get(column, {})]
                if seeds:
                    pairs[f"{group} {column}"] = [values[s] for s in seeds], [other[column][s] for s in seeds]
    return pairs


def comparison_notes(scores: Scores, *, of_one_run: bool = False, less_of: str = "") -> list[str]:
    """Every method against ERM, and delta-SAM against SAM: difference of the means, Holm-adjusted p, wins.

    Args:
        scores: The values of every run, in points, of which more is better.
        of_one_run: See :func:`compare`.
        less_of: A metric of which less is better: ``scores`` are then its values times -1.
    """
    methods = sorted({method for _, method in scores}, key=method_order)
    wanted = [(m, "ERM") for m in methods if m != "ERM"] + [
        (f"DeltaSAM{end}", f"SAM{end}") for end in ("", "+EmbeddingNoise")
    ]
    found = [
        (first, second, both)
        for first, second in wanted
        if (both := compare(scores, first, second, of_one_run=of_one_run)) is not None
    ]
    over = "columns" if of_one_run else "setups"
    adjusted = holm([comparison.p for _, _, (comparison, _) in found])
    return [
        f"{method_name(first)} − {method_name(second)}: {_difference(test, less_of)}, by mean better in {wins} "
        f"{over}; paired permutation test{'' if test.exact else ' (drawn)'} p = {test.p:.3g}, Holm {p:.3g} "
        f"({counted(test.pairs, 'pair')}; smallest possible p {test.smallest_p:.3g})."
        for (first, second, (test, wins)), p in zip(found, adjusted, strict=True)
    ]


def _difference(test: Comparison, less_of: str) -> str:
    return f"{-test.difference:+.3g} of {less_of} (less is better)" if less_of else f"{test.difference:+.2f} points"
