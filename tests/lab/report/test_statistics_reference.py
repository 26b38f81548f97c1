"""The statistics against slow, obvious ones: exact integers, ties, one and two seeds, unequal seeds, all methods."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from statistics import fmean

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deltasam.lab.report import (
    Cell,
    bootstrap_interval,
    compare,
    comparison_notes,
    count_wins,
    holm,
    paired_test,
    pooled_test,
)

right = st.integers(0, 277)  # answers of a small development set: ties are common


def exact_p(differences: list[int]) -> Fraction:
    """Share of the sign patterns whose sum is at least as far from 0, by counting sums of whole numbers."""
    counts = Counter({0: 1})
    for difference in differences:
        flipped: Counter[int] = Counter()
        for total, number in counts.items():
            flipped[total + difference] += number
            flipped[total - difference] += number
        counts = flipped
    bound = abs(sum(differences))
    return Fraction(sum(number for total, number in counts.items() if abs(total) >= bound), 2 ** len(differences))


@given(st.lists(st.tuples(right, right), min_size=1, max_size=40), st.sampled_from([1.0, 100 / 277, 0.01]))
@settings(max_examples=30, deadline=None)
def test_the_permutation_test_is_exact_with_ties(pairs: list[tuple[int, int]], unit: float) -> None:
    found = paired_test([a * unit for a, _ in pairs], [b * unit for _, b in pairs])
    assert found.exact
    assert found.p == pytest.approx(float(exact_p([a - b for a, b in pairs])), rel=1e-12, abs=0)


@given(st.lists(st.lists(st.tuples(right, right), min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_tasks_with_unequal_numbers_of_seeds_weigh_the_same(tasks: list[list[tuple[int, int]]]) -> None:
    found = pooled_test({str(i): tuple(zip(*pairs, strict=True)) for i, pairs in enumerate(tasks)})  # type: ignore[misc]
    # Times 12, which 1, 2, 3 and 4 divide: whole numbers again.
    terms = [12 // len(pairs) * (a - b) for pairs in tasks for a, b in pairs]
    assert found.p == pytest.approx(float(exact_p(terms)), rel=1e-12, abs=0)
    means = [fmean(a - b for a, b in pairs) for pairs in tasks]
    assert found.difference == pytest.approx(fmean(means), abs=1e-9)


@pytest.mark.parametrize(("first", "second", "p"), [([1.0], [0.0], 1.0), ([1.0, 2.0], [0.0, 0.0], 0.5)])
def test_one_and_two_seeds_are_never_significant(first: list[float], second: list[float], p: float) -> None:
    found = paired_test(first, second)
    assert (found.p, found.smallest_p) == (p, p)
    assert paired_test(first, first).p == 1.0


@given(st.lists(right, min_size=2, max_size=5), st.sampled_from([0.5, 0.8, 0.95, 0.99]))
@settings(max_examples=40, deadline=None)
def test_the_interval_equals_a_slow_one(values: list[int], level: float) -> None:
    """BCa by its definition, over all resamples, in whole numbers: sums in the place of means."""
    n, total = len(values), sum(values)
    sums = sorted(map(sum, itertools.product(values, repeat=n)))
    share = (sum(s < total for s in sums) + sum(s <= total for s in sums)) / (2 * len(sums))
    found = bootstrap_interval(values, level=level)
    if len(set(values)) == 1:
        assert found == (values[0], values[0])
        return
    left_out = [(total - value) / (n - 1) for value in values]
    spread = [fmean(left_out) - one for one in left_out]
    acceleration = sum(x**3 for x in spread) / (6 * sum(x**2 for x in spread) ** 1.5)
    bias = scipy.stats.norm.ppf(share)
    for end, tail in zip(found, ((1 - level) / 2, (1 + level) / 2), strict=True):
        z = bias + scipy.stats.norm.ppf(tail)
        place = scipy.stats.norm.cdf(bias + z / (1 - acceleration * z)) * len(sums)
        # Rounding may put a place that is a whole number to either side of it.
        near = {sums[min(max(int(np.ceil(place + shift)) - 1, 0), len(sums) - 1)] / n for shift in (-1e-6, 0, 1e-6)}
        assert any(end == pytest.approx(one, rel=1e-12, abs=1e-12) for one in near)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_holm_equals_the_closed_test_of_bonferroni(ps: list[float]) -> None:
    """Holm's is the closure of Bonferroni's: the largest, over all sets of hypotheses it is in, of size x smallest."""
    for index, adjusted in enumerate(holm(ps)):
        larger = [p for place, p in enumerate(ps) if place != index]
        wanted = 0.0
        for size in range(1, len(ps) + 1):
            others = sorted(larger, reverse=True)[: size - 1]  # the set of this size whose smallest p is largest
            wanted = max(wanted, min(1.0, size * min([ps[index], *others])))
        assert adjusted == pytest.approx(wanted, rel=1e-12, abs=0)


@pytest.mark.parametrize("ps", [[0.1, float("nan")], [1.5], [-0.1]])
def test_holm_raises_outside_0_to_1(ps: list[float]) -> None:
    with pytest.raises(ValueError, match=r"must be between 0 and 1"):
        holm(ps)
    assert holm([]) == []


@given(st.lists(st.tuples(right, right), min_size=2, max_size=10), st.sampled_from([100 / 277, 100 / 408, 0.01]))
@settings(max_examples=100, deadline=None)
def test_equal_means_are_a_tie_despite_rounding(pairs: list[tuple[int, int]], unit: float) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    assume(any(first))  # relative to a mean of 0 no rounding is small
    second[-1] += sum(first) - sum(second)  # as many right answers over all seeds
    wins = count_wins({"rte": fmean(a * unit for a in first)}, {"rte": fmean(b * unit for b in second)})
    assert (wins.wins, wins.ties, wins.setups) == (0, 1, 1)


def test_a_difference_of_one_answer_is_a_win() -> None:
    assert count_wins({"qqp": 100 * 30_001 / 404_300}, {"qqp": 100 * 30_000 / 404_300}).wins == 1
    assert count_wins({"a": 1e-12}, {"a": 0.0}).wins == 1


def test_only_common_seeds_are_compared() -> None:
    scores = {
        ("bert", "ERM"): {"mrpc": {1: 80.0, 2: 81.0, 3: 82.0}, "rte": {1: 60.0}},
        ("bert", "SAM"): {"mrpc": {2: 82.0, 3: 84.0, 4: 99.0}, "rte": {2: 61.0}, "cola": {1: 20.0}},
    }
    found = compare(scores, "SAM", "ERM")
    assert found is not None
    test, wins = found
    assert (test.pairs, test.tasks, test.difference) == (2, 1, 1.5)
    assert (wins.wins, wins.setups) == (1, 1)
    assert compare(scores, "DeltaSAM", "ERM") is None
    assert len(comparison_notes(scores)) == 1


@given(st.lists(right.map(float), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_best_of_five_takes_the_first_five_seeds(values: list[float]) -> None:
    cell = Cell(tuple(values), 100.0)
    assert cell.difference("max") == max(values[:5]) - 100.0
    assert cell.difference("mean") == pytest.approx(fmean(values) - 100.0)
