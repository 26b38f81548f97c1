"""A clock that only work moves: what is measured with it is known, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


class StoodClock:
    """Stands in for the clocks of ``time`` and stands still, but for work that says how long it takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.now = 0.0
        for name in names or ("perf_counter",):
            monkeypatch.setattr(time, name, lambda: self.now)

    def work(self, seconds: float) -> Callable[[], None]:
        """Work that takes so long; sums of fractions of a power of two are exact."""

        def take() -> None:
            self.now += seconds

        return take
