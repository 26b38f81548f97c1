"""Pools of sweeps for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deltasam.lab.sweeps import Event, Job
from deltasam.lab.sweeps._worker import attempt


class InThisProcess:
    """A pool without processes, which take seconds to start; tests/lab/sweeps tests those."""

    @classmethod
    def find(cls, jobs: int | None) -> InThisProcess:
        return cls()

    def run(self, jobs: Sequence[Job]) -> Iterator[Event]:
        for job in jobs:
            yield Event.of_outcome(job, 1, attempt(job, 1, lambda report: None))
