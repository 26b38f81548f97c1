"""Statistics over seeds: summaries with BCa intervals, exact paired permutation tests, Holm's adjustment, wins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from deltasam.step.names import pluralized

_ENUMERATED = 6  # up to 6 values, all n^n resamples are taken (46,656); beyond that they are drawn
_RESAMPLES = 20_000
_RESAMPLED_NUMBERS = 2_000_000  # bounds the memory: hundreds of runs get fewer resamples
_EXACT_PAIRS = 40  # two halves of 2^20 sign patterns each; beyond that, signs are drawn
_SIGN_PATTERNS = 100_000


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Statistics of the values of one table cell."""

    n: int  #: Number of runs.
    mean: float  #: Mean.
    median: float  #: Median.
    min: float  #: Smallest value.
    max: float  #: Largest value.
    std: float  #: Standard deviation with n - 1; nan for a single run.
    low: float  #: Lower end of the interval for the mean.
    high: float  #: Upper end of the interval for the mean.
    level: float  #: Confidence level of the interval.


def summarize(values: Sequence[float], *, level: float = 0.95) -> Summary:
    """Computes mean, median, extremes, standard deviation and bootstrap interval of one value per run.

    Raises:
        ValueError: ``values`` is empty or has a value that is not finite.

    Example:
        >>> found = summarize([84.0, 86.0, 85.0, 87.0, 83.0])
        >>> found.mean, found.median, found.max, round(found.std, 3)
        (85.0, 85.0, 87.0, 1.581)
    """
    given = _finite(values)
    low, high = bootstrap_interval(given, level=level)
    return Summary(
        n=len(given),
        mean=float(given.mean()),
        median=float(np.median(given)),
        min=float(given.min()),
        max=float(given.max()),
        std=float(given.std(ddof=1)) if len(given) > 1 else math.nan,
        low=low,
        high=high,
        level=level,
    )


def bootstrap_interval(values: Sequence[float], *, level: float = 0.95) -> tuple[float, float]:
    """Computes the bias-corrected and accelerated (BCa) bootstrap interval of the mean.

    Up to 6 values, all resamples are enumerated. Beyond that, up to 20,000 are drawn with a fixed seed. The same
    values therefore always give the same interval, in any order; :func:`scipy.stats.bootstrap` draws in both cases.
    With few runs the interval is too short: at 95% it covered the mean of 3 normal values in 73% of cases, of 5 in
    84%, of 10 in 89% (``benchmarks/interval_coverage.py``). It shows the spread; it is not a test.

    Raises:
        ValueError: ``values`` is empty, or ``level`` is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level} must be between 0 and 1")
    given = np.sort(_finite(values))
    mean = float(given.mean())
    means = np.sort(_resampled_means(given))
    # The same values summed in another order differ in their last bits. They are ties all the same.
    rounding = 1e-12 * float(np.abs(given).max())
    below, upto = np.searchsorted(means, [mean - rounding, mean + rounding])
    share = (below + upto) / (2 * len(means))
    if len(given) == 1 or means[0] == means[-1] or not 0 < share < 1:
        return mean, mean
    normal = NormalDist()
    bias = normal.inv_cdf(share)
    influence = mean - given  # of the leave-one-out means, up to a factor that cancels
    influence /= np.abs(influence).max()  # its powers must not overflow: perplexities of runs that diverged
    acceleration = -float((influence**3).sum() / (6 * (influence**2).sum() ** 1.5))

    def end(tail: float) -> float:
        z = bias + normal.inv_cdf(tail)
        return float(np.quantile(means, normal.cdf(bias + z / (1 - acceleration * z)), method="inverted_cdf"))

    return end((1 - level) / 2), end((1 + level) / 2)


def _resampled_means(values: np.ndarray) -> np.ndarray:
    n = len(values)
    if n <= _ENUMERATED:
        sums = values
        for _ in range(n - 1):
            sums = np.add.outer(sums, values).ravel()
        return sums / n
    count = max(2_000, min(_RESAMPLES, _RESAMPLED_NUMBERS // n))
    drawn = np.random.default_rng(0).integers(n, size=(count, n), dtype=np.int32)
    return np.asarray(values[drawn].mean(axis=1))


def _finite(values: Sequence[float]) -> np.ndarray:
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1 or len(given) == 0:
        raise ValueError(f"values={values!r}: must hold at least one number")
    if not np.isfinite(given).all():
        raise ValueError(f"values={list(values)!r}: must be finite; leave out runs that diverged")
    return given


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Outcome of a paired test."""

    difference: float  #: Mean over the tasks of the mean difference, first minus second.
    p: float  #: Two-sided p-value.
    smallest_p: float  #: Smallest p-value that this number of pairs can give.
    pairs: int  #: Pairs of runs.
    tasks: int  #: Tasks pooled.
    exact: bool  #: Whether all sign patterns were counted. Otherwise 100,000 were drawn with a fixed seed.

    def __str__(self) -> str:
        pooled = f" pooled over {self.tasks} tasks" if self.tasks > 1 else ""
        about = "=" if self.exact else "≈"
        return (
            f"{self.difference:+.4g}, p {about} {self.p:.4g} "
            f"({pluralized(self.pairs, 'pair')}{pooled}; no p below {self.smallest_p:.3g} is possible)"
        )


def paired_test(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Exact paired permutation test of two methods over the same seeds.

    Under the null hypothesis, exchanging the two results of a seed flips the sign of their difference. p is the share
    of the 2^n sign patterns whose mean is at least as far from 0. It cannot fall below 2 / 2^n: 0.0625 for 5 seeds.

    Raises:
        ValueError: The results are not paired, or one is not finite.

    Example:
        >>> found = paired_test([2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 1.0, 1.0, 1.0, 1.0])
        >>> found.difference, found.p, found.smallest_p
        (3.0, 0.0625, 0.0625)
    """
    return pooled_test({"": (first, second)})


def pooled_test(tasks: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Comparison:
    """Paired permutation test over seeds, stratified by task: signs are flipped pair by pair within each task.

    The statistic is the mean over tasks of the mean difference, so a task with more seeds weighs no more. Up to 40
    pairs (8 tasks with 5 seeds) are counted exactly: the sums of one half of the pairs are looked up among the sorted
    sums of the other half. :func:`scipy.stats.permutation_test` would enumerate all 2^40 patterns.

    Args:
        tasks: For each task, the results of the first and the second method, paired by seed.

    Raises:
        ValueError: There is no pair, the results of a task are not paired, or one is not finite.
    """
    shares = []
    for name, (first, second) in tasks.items():
        if len(first) != len(second) or len(first) == 0:
            raise ValueError(
                f"task {name!r} has {len(first)} and {len(second)} results; "
                "a paired test needs the same seeds on both sides"
            )
        shares.append((np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)) / len(first))
    if not shares:
        raise ValueError("tasks={}: there is no pair to test")
    # Sorted, so that the order of seeds and tasks does not change the rounding.
    terms = np.sort(np.concatenate(shares) / len(shares))
    if not np.isfinite(terms).all():
        raise ValueError("a result is not finite; leave out runs that diverged")
    bound = abs(float(terms.sum())) - 1e-9 * float(np.abs(terms).sum())  # the order of summation changes less
    exact = len(terms) <= _EXACT_PAIRS
    smallest = 2.0 / 2.0 ** len(terms)
    return Comparison(
        difference=float(terms.sum()),
        p=(_exact_p if exact else _drawn_p)(terms, bound),
        smallest_p=min(1.0, smallest) if exact else max(smallest, 1 / (_SIGN_PATTERNS + 1)),
        pairs=len(terms),
        tasks=len(shares),
        exact=exact,
    )


def _exact_p(terms: np.ndarray, bound: float) -> float:
    if bound <= 0:
        return 1.0
    half = len(terms) // 2
    one, other = _signed_sums(terms[:half]), np.sort(_signed_sums(terms[half:]))
    # By symmetry the lower tail is as large as the upper one.
    upper = len(other) * len(one) - int(np.searchsorted(other, bound - one, side="left").sum())
    return float(2 * upper / (len(other) * len(one)))


def _signed_sums(terms: np.ndarray) -> np.ndarray:
    sums = np.zeros(1)
    for term in terms:
        sums = np.concatenate([sums + term, sums - term])
    return sums


def _drawn_p(terms: np.ndarray, bound: float) -> float:
    random, far = np.random.default_rng(0), 0
    for _ in range(_SIGN_PATTERNS // 10_000):
        signs = random.integers(2, size=(10_000, len(terms)), dtype=np.int8) * 2 - 1
        far += int((np.abs(signs @ terms) >= bound).sum())
    return (far + 1) / (_SIGN_PATTERNS + 1)


def holm(ps: Sequence[float]) -> list[float]:
    """Returns the p-values adjusted by Holm's step-down method, in the order given.

    Raises:
        ValueError: A value is not between 0 and 1.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    if not all(0 <= p <= 1 for p in ps):
        raise ValueError(f"ps={list(ps)}: must be between 0 and 1")
    adjusted = [0.0] * len(ps)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True, kw_only=True)
class Wins:
    """In how many setups a method is better, as the paper counts."""

    wins: int  #: Setups in which it is strictly better.
    ties: int  #: Setups in which both are equal.
    setups: int  #: Setups that both methods have.

    def __str__(self) -> str:
        return f"{self.wins} of {self.setups}" + (f" ({pluralized(self.ties, 'tie')})" if self.ties else "")


def count_wins(first: Mapping[Any, float], second: Mapping[Any, float]) -> Wins:
    """Counts the setups, such as (model, task), in which the first method has the larger value.

    Setups that one method lacks do not count.

    Example:
        >>> str(count_wins({"MRPC": 89.5, "QNLI": 91.5, "RTE": 72.2}, {"MRPC": 88.2, "QNLI": 91.7, "RTE": 69.3}))
        '2 of 3'
    """
    common = [setup for setup in first if setup in second]
    # Equal up to rounding; one answer in a million is far more than that.
    ties = {setup for setup in common if math.isclose(first[setup], second[setup], rel_tol=1e-9)}
    wins = sum(first[setup] > second[setup] for setup in common if setup not in ties)
    return Wins(wins=wins, ties=len(ties), setups=len(common))
