"""Whether one method is better than another: exact paired permutation tests over seeds, pooled over tasks; Holm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deltasam.step.names import counted

_EXACT_PAIRS = 40  # two halves of 2^20 sign patterns each; beyond that signs are drawn
_DRAWN = 100_000
_TIE = 1e-9  # relative; sums of the same differences in another order are equal

Pairs = Mapping[str, tuple[Sequence[float], Sequence[float]]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outcome of a paired test.

    Attributes:
        difference: Mean over the tasks of the mean difference, first minus second.
        p: Two-sided p-value.
        smallest_p: The smallest p that so many pairs can give at all.
        pairs: Pairs of runs.
        tasks: Tasks that were pooled.
        exact: Whether all sign patterns were counted; otherwise 100,000 were drawn from a fixed seed.
    """

    difference: float
    p: float
    smallest_p: float
    pairs: int
    tasks: int
    exact: bool

    def __str__(self) -> str:
        pooled = f" pooled over {self.tasks} tasks" if self.tasks > 1 else ""
        about = "=" if self.exact else "≈"
        return (
            f"{self.difference:+.4g}, p {about} {self.p:.4g} "
            f"({counted(self.pairs, 'pair')}{pooled}; no p below {self.smallest_p:.3g} is possible)"
        )


def paired_test(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Exact paired permutation test of two methods over the same seeds.

    Under the null hypothesis the two results of a seed could as well be exchanged, which flips the sign of their
    difference; p is the share of the 2^n sign patterns whose mean is at least as far from 0. With n pairs p cannot go
    below 2 / 2^n: 0.0625 for 5 seeds.

    Args:
        first: Results of the first method, one per seed.
        second: Results of the second method for the same seeds.

    Returns:
        The difference and its p.

    Raises:
        ValueError: The two are not paired.

    Example:
        >>> found = paired_test([2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 1.0, 1.0, 1.0, 1.0])
        >>> found.difference, found.p, found.smallest_p
        (3.0, 0.0625, 0.0625)
    """
    return pooled_test({"": (first, second)})


def pooled_test(tasks: Pairs) -> Comparison:
    """Paired permutation test over seeds, stratified by task: signs are flipped pair by pair, within each task.

    The statistic is the mean over tasks of the mean difference, so that a task with more seeds weighs no more. Up to
    40 pairs are counted exactly (8 tasks with 5 seeds), by splitting the pairs in two halves and sorting the sums of
    one.

    Args:
        tasks: For every task the results of the first and the second method, paired by seed.

    Returns:
        The difference and its p.

    Raises:
        ValueError: There is no pair, or the two sides of a task are not paired.
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
    # Sorted, so that the order of seeds and tasks does not even change the rounding.
    terms = np.sort(np.concatenate(shares) / len(shares))
    if not np.isfinite(terms).all():
        raise ValueError("a result is not finite; a run that diverged cannot be tested")
    exact = len(terms) <= _EXACT_PAIRS
    return Comparison(
        difference=float(terms.sum()),
        p=_count(terms) if exact else _draw(terms),
        smallest_p=min(1.0, 2.0 / 2.0 ** len(terms)) if exact else max(2.0 / 2.0 ** len(terms), 1 / (_DRAWN + 1)),
        pairs=len(terms),
        tasks=len(shares),
        exact=exact,
    )


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of several p-values, in the order given.

    Raises:
        ValueError: One is no p-value.

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


def _count(terms: np.ndarray) -> float:
    """Share of sign patterns whose sum is at least as far from 0 as the one observed."""
    bound = abs(float(terms.sum())) - _TIE * float(np.abs(terms).sum())
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


def _draw(terms: np.ndarray) -> float:
    random = np.random.default_rng(0)
    bound = abs(float(terms.sum())) - _TIE * float(np.abs(terms).sum())
    far = 0
    for _ in range(_DRAWN // 10_000):
        signs = random.integers(2, size=(10_000, len(terms)), dtype=np.int8) * 2 - 1
        far += int((np.abs(signs @ terms) >= bound).sum())
    return (far + 1) / (_DRAWN + 1)
