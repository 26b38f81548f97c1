"""Times several functions in turn, so that a slow phase of the machine affects all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Clock = Literal["wall", "cpu"]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Returns median, lower and upper quartile; for a single value, that value three times."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def interleaved(
    works: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    warmup: int,
    clock: Clock,
    synchronize: Callable[[], None],
    repeats: Mapping[str, int] | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Returns the seconds of every function in every round. In a round, each runs once, in rotating order.

    Args:
        works: The functions to time, by name.
        rounds: Number of timed rounds.
        warmup: Number of earlier rounds without timing.
        clock: Wall time, or processor time of this process.
        synchronize: Waits until the device is idle.
        repeats: Number of calls per round, by name. The result is the mean time of a call.
        prepare: Called before every turn, not timed.

    Returns:
        The seconds by name, one entry per round. The same index means the same round.
    """
    now = time.perf_counter if clock == "wall" else time.process_time
    names = list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with _frozen_garbage_collector():
        for turn in range(-warmup, rounds):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                times = (repeats or {}).get(name, 1)
                prepare()
                synchronize()
                before = now()
                for _ in range(times):
                    works[name]()
                synchronize()
                if turn >= 0:
                    seconds[name].append((now() - before) / times)
    return seconds


@contextmanager
def _frozen_garbage_collector() -> Iterator[None]:
    """Excludes existing objects from Python's garbage collection.

    A full collection takes longer than a step. In training it happens once in thousands of steps, but in a fresh
    process it happens within the first few and would distort the timing of a single candidate.
    """
    gc.collect()
    if gc.get_freeze_count():  # by the caller, which must stay: Python can only unfreeze everything
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def ratios(seconds: Mapping[str, list[float]], name: str, base: str) -> Spread:
    """Returns the time of ``name`` relative to ``base``, round by round."""
    return Spread.of([a / b for a, b in zip(seconds[name], seconds[base], strict=True)])
