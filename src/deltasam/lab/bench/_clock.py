"""Times several pieces of work in turn, so that a slow minute of the machine meets all of them."""

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
    """The middle of some measurements and the quarters around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Median, lower and upper quartile; of a single value, that value three times."""
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
    """Seconds of every work in every round. In a round each takes its turn, in rotating order.

    Args:
        works: The work to time, by name.
        rounds: Timed rounds.
        warmup: Rounds that are not timed.
        clock: Wall time or processor time of this process.
        synchronize: Waits until the device is idle.
        repeats: How often a work is run in its turn; its seconds are those of one run on average.
        prepare: Called before every turn, outside the clock.

    Returns:
        For every name, its seconds, one entry a round; the same position means the same round.
    """
    now = time.perf_counter if clock == "wall" else time.process_time
    names = list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with _older_objects_set_aside():
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
def _older_objects_set_aside() -> Iterator[None]:
    """Python's collector looks at what the works make, as in training, but not at all that was imported before.

    A look at everything takes longer than a step. It comes once in thousands of steps of training, but in the first
    few of a fresh process, and would then be on the bill of whoever had its turn.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def ratios(seconds: Mapping[str, list[float]], name: str, base: str) -> Spread:
    """How many times longer ``name`` takes than ``base``, round by round."""
    return Spread.of([a / b for a, b in zip(seconds[name], seconds[base], strict=True)])
