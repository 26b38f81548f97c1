"""A fake clock that only advances by given amounts, so that measurements do not depend on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


class StoodClock:
    """Replaces clocks of ``time``; only :meth:`work` advances it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.now = 0.0
        for name in names or ("perf_counter",):
            monkeypatch.setattr(time, name, lambda: self.now)

    def work(self, seconds: float) -> Callable[[], None]:
        """Work that takes this long; sums of fractions of a power of two are exact."""

        def take() -> None:
            self.now += seconds

        return take
