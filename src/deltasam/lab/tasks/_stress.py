"""Harder training data: few rows, and wrong labels."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from deltasam.lab.tasks._data import Row


def balanced(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """Returns a random sample with equally many rows of each class, in the order of ``rows``.

    A class that has too few rows gives all it has, and the others fill up.

    Example:
        >>> rows = [{"label": 0}] * 6 + [{"label": 1}] * 2
        >>> [row["label"] for row in balanced(rows, 6, seed=0)]
        [0, 0, 0, 0, 1, 1]
    """
    generator = random.Random(f"rows {seed}")
    of_class = _by_class(rows)
    for indices in of_class.values():
        generator.shuffle(indices)
    kept: list[int] = []
    left = sorted(of_class.values(), key=len)
    while left:
        share = (count - len(kept)) // len(left)  # of each class that is left; the smallest come first
        kept += left.pop(0)[:share]
    return [rows[index] for index in sorted(kept)]


def sampled(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """Returns a random sample of the rows, in their order."""
    kept = random.Random(f"rows {seed}").sample(range(len(rows)), min(count, len(rows)))
    return [rows[index] for index in sorted(kept)]


def with_wrong_labels(rows: Sequence[Row], share: float, classes: Sequence[int], seed: int) -> list[Row]:
    """Returns the rows with the labels of this share of each class replaced by another class, drawn evenly.

    Rows with a wrong label have the right one as ``clean_label``.

    Example:
        >>> noisy = with_wrong_labels([{"label": 0}] * 5 + [{"label": 1}] * 5, 0.4, [0, 1], seed=0)
        >>> [row["label"] for row in noisy].count(1), sum("clean_label" in row for row in noisy)
        (5, 4)
    """
    generator = random.Random(f"labels {seed}")
    found = [dict(row) for row in rows]
    for label, indices in sorted(_by_class(rows).items()):
        others = [other for other in classes if other != label]
        for index in generator.sample(indices, round(share * len(indices))):
            found[index] |= {"label": generator.choice(others), "clean_label": label}
    return found


def _by_class(rows: Sequence[Row]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        found[row["label"]].append(index)
    return found
