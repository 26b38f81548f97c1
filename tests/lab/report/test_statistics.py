"""The statistics equal scipy's and have the properties they must have."""

from __future__ import annotations

import inspect
import math
import statistics

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasam.lab.report import bootstrap_interval, count_wins, paired_test, pooled_test, summarize

score = st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 3))
pairs = st.lists(st.tuples(score, score), min_size=1, max_size=9)


def mean_difference(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
    return np.mean(a - b, axis=axis)


@given(st.lists(score, min_size=2, max_size=12))
@settings(max_examples=50, deadline=None)
def test_summary_equals_the_standard_library(values: list[float]) -> None:
    found = summarize(values)
    assert found.n == len(values)
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.median == pytest.approx(statistics.median(values))
    assert (found.min, found.max) == (min(values), max(values))
    assert found.std == pytest.approx(statistics.stdev(values), abs=1e-9)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9


@pytest.mark.parametrize("n", [3, 5, 6, 12, 30])
def test_interval_equals_scipys_bca(n: int) -> None:
    random = np.random.default_rng(n)
    values = random.gamma(2.0, size=n)  # skewed, so that bias and acceleration matter
    found = bootstrap_interval(values)
    known = inspect.signature(scipy.stats.bootstrap).parameters
    drawn = {"rng" if "rng" in known else "random_state": random}  # the second until scipy 1.15
    wanted = scipy.stats.bootstrap((values,), np.mean, n_resamples=60_000, method="BCa", **drawn).confidence_interval
    assert found == pytest.approx(tuple(wanted), abs=0.04 * values.std())


@given(st.lists(score, min_size=1, max_size=9), st.randoms())
@settings(max_examples=40, deadline=None)
def test_the_order_of_the_seeds_changes_nothing(values: list[float], random: object) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)
    assert bootstrap_interval(values) == bootstrap_interval(shuffled)


@given(st.lists(st.integers(0, 277), min_size=2, max_size=9), st.sampled_from([0.01, 0.1, 1 / 277, 100 / 277]))
@settings(max_examples=60, deadline=None)
def test_the_unit_of_the_scores_does_not_change_the_interval(right: list[int], unit: float) -> None:
    """The resamples whose mean is the observed one are ties in every unit, though their sums round differently."""
    wanted = [end * unit for end in bootstrap_interval(right)]
    assert bootstrap_interval([number * unit for number in right]) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("unit", [1e300, 1e150, 1e-150])
def test_huge_and_tiny_values_have_an_interval(unit: float) -> None:
    values = [1.0, 2.0, 4.0, 3.5]
    wanted = [end * unit for end in bootstrap_interval(values)]
    assert bootstrap_interval([value * unit for value in values]) == pytest.approx(wanted, rel=1e-9, abs=0)


def test_a_single_run_and_equal_runs_have_a_point_as_interval() -> None:
    one = summarize([3.0])
    assert (one.low, one.high, one.n) == (3.0, 3.0, 1)
    assert math.isnan(one.std)
    assert bootstrap_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_without_a_finite_mean_raise(values: list[float]) -> None:
    with pytest.raises(ValueError, match="values="):
        summarize(values)


@pytest.mark.parametrize("n", [2, 5, 8, 11])
def test_paired_test_equals_scipys(n: int) -> None:
    random = np.random.default_rng(n)
    for shift in (0.0, 0.5, 3.0):
        first, second = random.normal(shift, size=n), random.normal(size=n)
        wanted = scipy.stats.permutation_test(
            (first, second), mean_difference, permutation_type="samples", n_resamples=np.inf, vectorized=True
        )
        found = paired_test(first, second)
        assert found.exact
        assert found.p == pytest.approx(wanted.pvalue)
        assert found.difference == pytest.approx(wanted.statistic)


def test_five_seeds_cannot_go_below_a_sixteenth_but_eight_tasks_can() -> None:
    first, second = [2.0, 3.0, 4.0, 5.0, 6.5], [1.0] * 5
    one = paired_test(first, second)
    assert (one.p, one.smallest_p) == (0.0625, 0.0625)
    assert "no p below 0.062" in str(one)
    eight = pooled_test({str(i): (first, second) for i in range(8)})
    assert eight.exact
    assert eight.p == eight.smallest_p == 2 / 2**40


def test_beyond_forty_pairs_signs_are_drawn_and_agree() -> None:
    random = np.random.default_rng(1)
    first, second = random.normal(0.2, size=44), random.normal(size=44)
    found = paired_test(first, second)
    assert not found.exact
    assert "≈" in str(found)
    wanted = scipy.stats.ttest_rel(first, second).pvalue
    assert found.p == pytest.approx(wanted, abs=0.02)


@given(pairs)
@settings(max_examples=60, deadline=None)
def test_swapping_the_methods_flips_the_sign(given_pairs: list[tuple[float, float]]) -> None:
    first, second = zip(*given_pairs, strict=True)
    forth, back = paired_test(first, second), paired_test(second, first)
    assert forth.difference == pytest.approx(-back.difference, abs=1e-9)
    assert forth.p == pytest.approx(back.p)
    assert forth.smallest_p - 1e-12 <= forth.p <= 1


@given(pairs, st.randoms())
@settings(max_examples=60, deadline=None)
def test_permuting_the_seeds_changes_nothing(given_pairs: list[tuple[float, float]], random: object) -> None:
    shuffled = list(given_pairs)
    random.shuffle(shuffled)
    assert paired_test(*zip(*given_pairs, strict=True)) == paired_test(*zip(*shuffled, strict=True))


def test_unpaired_results_raise() -> None:
    with pytest.raises(ValueError, match="'mrpc' has 2 and 1 results"):
        pooled_test({"mrpc": ([1.0, 2.0], [1.0])})
    with pytest.raises(ValueError, match="no pair"):
        pooled_test({})


def test_wins_and_ties() -> None:
    first, second = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 1.0}, {"a": 2.0, "b": 1.0, "c": 3.0, "e": 0.0}
    assert str(count_wins(first, second)) == "1 of 3 (1 tie)"


def test_drawn_signs_never_give_a_p_of_zero() -> None:
    found = paired_test([1.0] * 44, [0.0] * 44)
    assert not found.exact
    assert found.p == found.smallest_p == 1 / 100_001


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_raises(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        paired_test([1.0, bad, 2.0], [0.5, 0.5, 0.5])
