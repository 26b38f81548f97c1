"""Methods against each other in words: pooled paired tests with Holm, and how often one wins."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from deltasam.report._names import method_name, method_order
from deltasam.report._tests import Comparison, holm, pooled_test
from deltasam.report._wins import Wins, count_wins

Scores = Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]]
"""(model, method) -> column -> value by seed."""


def compare(scores: Scores, first: str, second: str) -> tuple[Comparison, Wins] | None:
    """Two methods over all models and columns, paired by the seeds that both have; None if there is no pair."""
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    for (group, method), columns in scores.items():
        other = scores.get((group, second), {})
        if method == first:
            for column, values in columns.items():
                seeds = [seed for seed in values if seed in other.get(column, {})]
                if seeds:
                    pairs[f"{group} {column}"] = [values[s] for s in seeds], [other[column][s] for s in seeds]
    if not pairs:
        return None
    means = [{cell: fmean(both[side]) for cell, both in pairs.items()} for side in (0, 1)]
    return pooled_test(pairs), count_wins(means[0], means[1])


def comparison_notes(scores: Scores) -> list[str]:
    """Every method against ERM, and delta-SAM against SAM: difference of the means, Holm-adjusted p, wins."""
    methods = sorted({method for _, method in scores}, key=method_order)
    wanted = [(m, "ERM") for m in methods if m != "ERM"] + [
        (f"DeltaSAM{end}", f"SAM{end}") for end in ("", "+EmbeddingNoise")
    ]
    found = [(first, second, both) for first, second in wanted if (both := compare(scores, first, second)) is not None]
    adjusted = holm([comparison.p for _, _, (comparison, _) in found])
    return [
        f"{method_name(first)} − {method_name(second)}: {test.difference:+.2f} points, by mean better in {wins} "
        f"setups; paired permutation test{'' if test.exact else ' (drawn)'} p = {test.p:.3g}, Holm {p:.3g} "
        f"({test.pairs} pairs; smallest possible p {test.smallest_p:.3g})."
        for (first, second, (test, wins)), p in zip(found, adjusted, strict=True)
    ]
