"""Statistics of long frames (``row``, ``column``, ``unit``, ``value``), as tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import pandas as pd

from deltasam.lab.report import bootstrap_interval, holm, method_name, paired_test, pooled_test

Label = Callable[[str], str]
Pairs = Sequence[tuple[str, str]]
Ends = tuple[float, float, float]
"""A mean, and the lower and upper end of its interval."""

RESAMPLES = 20_000


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown. A cell may hold several columns, joined by `` | ``."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, "|" + "---|" * (first.count("|") - 1), *others])


def mean_and_ends(values: Iterable[float]) -> Ends:
    """The mean and its 95% bootstrap interval (BCa)."""
    found = np.asarray(list(values), dtype=np.float64)
    return (float(found.mean()), *bootstrap_interval(found))


def interval(values: Iterable[float], digits: int = 2) -> str:
    """The mean with its interval, or the only value."""
    found = list(values)
    mean, low, high = mean_and_ends(found)
    ends = f" [{low:.{digits}f}, {high:.{digits}f}]" if len(found) > 1 else ""
    return f"{mean:.{digits}f}{ends}"


def series(frame: pd.DataFrame) -> dict[tuple[str, str], pd.Series]:
    """(row, column) -> values by unit."""
    groups = frame.groupby(["row", "column"], sort=False)
    return {key: group.set_index("unit")["value"].sort_index() for key, group in groups}


def difference(cells: Mapping[tuple[str, str], pd.Series], first: str, second: str, column: str) -> list[float]:
    """First minus second, over the units that both have."""
    if (first, column) not in cells or (second, column) not in cells:
        return []
    return list(cells[first, column].sub(cells[second, column]).dropna())


def cell_table(
    frame: pd.DataFrame, cell: Callable[[list[float]], str], head: str = "method", label: Label = method_name
) -> str:
    """One cell for every row and column; ``-`` if there is no value."""
    cells, columns = series(frame), list(frame["column"].unique())
    rows = [
        [label(row), *(cell(list(cells[row, column])) if (row, column) in cells else "-" for column in columns)]
        for row in frame["row"].unique()
    ]
    return table([head, *columns], rows)


def means(frame: pd.DataFrame, digits: int = 1, head: str = "method", label: Label = method_name) -> str:
    """Mean and interval; a cell with fewer seeds than the others gives their number."""
    most = int(frame.groupby(["row", "column"]).size().max())
    return cell_table(
        frame, lambda v: interval(v, digits) + ("" if len(v) == most else f" (n = {len(v)})"), head, label
    )


def batch_mean(values: list[float]) -> str:
    """Mean and interval over batches; a batch without a number (all weights are equal) is left out and counted."""
    known = [value for value in values if np.isfinite(value)]
    count = "" if len(known) == len(values) else f" ({len(known)} of {len(values)} batches)"
    return interval(known) + count if known else "-"


def median_and_best(values: list[float]) -> str:
    """The median and the best seed."""
    return f"{np.median(values):.1f} / {max(values):.1f}"


def geometric_mean(values: list[float]) -> str:
    """Geometric mean and interval of positive numbers."""
    return "{:.2g} [{:.2g}, {:.2g}]".format(*np.exp(mean_and_ends(np.log(np.maximum(values, 1e-30)))))


def differences(
    frame: pd.DataFrame, pairs: Pairs, head: str = "difference", label: Label = method_name, *, test: bool = True
) -> str:
    """A row for every pair of methods: mean difference paired by unit, interval, number of pairs, p.

    The p-values are those of exact paired permutation tests after Holm's correction. The tests of a column that have
    the same second method are one family.
    """
    cells, columns = series(frame), list(frame["column"].unique())
    texts: dict[tuple[str, str, str], str] = {}
    for column in columns:
        for second in dict.fromkeys(second for _, second in pairs):
            family = {a: found for a, b in pairs if b == second if (found := difference(cells, a, b, column))}
            adjusted = holm([paired_test(found, [0.0] * len(found)).p for found in family.values()])
            for (first, found), p in zip(family.items(), adjusted, strict=True):
                texts[first, second, column] = interval(found) + (f" (n = {len(found)}, p = {p:.2g})" if test else "")
    rows = [
        [f"{label(a)} - {label(b)}", *(texts.get((a, b, column), "-") for column in columns)]
        for a, b in pairs
        if any((a, b, column) in texts for column in columns)
    ]
    return table([head, *columns], rows)


def stratified_interval(groups: Mapping[str, Sequence[float]]) -> Ends:
    """Mean over the groups of their means, with a 95% percentile interval: units are resampled within each group."""
    drawn = _resamples(tuple(map(len, groups.values())))
    resampled = np.mean([np.asarray(v)[rows].mean(axis=1) for v, rows in zip(groups.values(), drawn, strict=True)], 0)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return float(np.mean([np.mean(values) for values in groups.values()])), float(low), float(high)


@lru_cache(maxsize=4)
def _resamples(sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Places of the resampled values, for groups of these sizes. Drawing takes the most time, and tables share it."""
    random = np.random.default_rng(0)
    return [random.integers(size, size=(RESAMPLES, size)) for size in sizes]


def pooled_differences(frame: pd.DataFrame, pairs: Pairs) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Pair -> column -> differences, for the pairs that share at least two columns besides CoLA."""
    cells, columns = series(frame), list(frame["column"].unique())
    found = {
        (a, b): {column: values for column in columns if (values := difference(cells, a, b, column))} for a, b in pairs
    }
    return {pair: at for pair, at in found.items() if len(without_cola(at)) > 1}


def without_cola(groups: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """All columns except CoLA of either encoder."""
    return {name: values for name, values in groups.items() if not name.startswith("CoLA")}


def pooled(frame: pd.DataFrame, pairs: Pairs) -> str:
    """A row for every pair of methods over all tasks; each task counts the same. Holm's correction is per column."""
    found = pooled_differences(frame, pairs)
    texts = []
    for groups in (list(found.values()), [without_cola(at) for at in found.values()]):
        tests = [pooled_test({name: (values, [0.0] * len(values)) for name, values in at.items()}) for at in groups]
        adjusted = holm([test.p for test in tests])
        texts.append(
            [
                "{:.2f} [{:.2f}, {:.2f}] (p = {:.2g})".format(*stratified_interval(at), p)
                for at, p in zip(groups, adjusted, strict=True)
            ]
        )
    rows = [
        [f"{method_name(a)} - {method_name(b)}", str(len(at)), every, others,
         f"{sum(sum(values) > 0 for values in at.values())} of {len(at)}"]
        for ((a, b), at), every, others in zip(found.items(), *texts, strict=True)
    ]  # fmt: skip
    return table(["difference", "tasks", "all tasks", "without CoLA", "first is better on"], rows)
