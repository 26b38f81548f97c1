"""Makes the runs of a sweep on one machine, in worker processes that share its GPUs; retries failed runs.

``concurrent.futures.ProcessPoolExecutor`` is not used: when one of its workers is killed, it fails all runs under way
and does not report which one died; and before Python 3.14 it cannot send its workers SIGTERM, on which a run writes a
checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from deltasam.lab.experiments.lock import is_locked
from deltasam.lab.sweeps._worker import Job, work

ATTEMPTS = 2
_PRELOAD = ["deltasam.lab.sweeps._worker", "deltasam.integrations", "transformers.trainer"]  # what a run imports
GRACE = 15.0  # seconds for the checkpoints of all runs when the sweep is stopped


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a run.

    Attributes:
        kind: ``started``, ``step``, ``finished`` (trained now), ``found`` (existed), ``retried`` or ``failed``.
        run: Name of the run.
        attempt: 1, or 2 for the second attempt.
        step: The update, for ``step``.
        total: Total number of updates, for ``step``.
        metric: Primary metric, for ``finished`` and ``found``.
        value: Its value.
        note: What the user should know of a finished run.
        error: The error, for ``retried`` and ``failed``.
    """

    kind: str
    run: str
    attempt: int
    step: int = 0
    total: int = 0
    metric: str = ""
    value: float | None = None
    note: str = ""
    error: str = ""

    @classmethod
    def of_outcome(cls, job: Job, attempt: int, outcome: tuple[Any, ...]) -> Event:
        """The event for what :func:`~deltasam.lab.sweeps._worker.attempt` returned."""
        if outcome[0] == "finished":
            _, trained, metric, value, note = outcome
            kind = "finished" if trained else "found"
            return cls(kind=kind, run=job.name, attempt=attempt, metric=metric, value=value, note=note)
        _, error, worth_retrying = outcome
        kind = "retried" if worth_retrying and attempt < ATTEMPTS else "failed"
        return cls(kind=kind, run=job.name, attempt=attempt, error=error)


@dataclass
class _Worker:
    process: Any
    slot: int
    job: Job = field(init=False)
    attempt: int = field(init=False)


@dataclass(frozen=True, kw_only=True)
class LocalPool:
    """Worker processes on this machine.

    Attributes:
        workers: Runs at a time; by default one per GPU, or one per four cores without GPUs.
        gpus: The GPUs, as in ``CUDA_VISIBLE_DEVICES``; workers are assigned to them in turn. On GPUs, where a process
            is slow to start, a worker makes one run after the other. A run sets its own seeds and precision, so the
            result is the same as in a new process.
    """

    workers: int
    gpus: tuple[str, ...] = ()

    @classmethod
    def find(cls, workers: int | None = None) -> LocalPool:
        """Returns a pool for the GPUs and cores of this machine."""
        import torch

        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = torch.cuda.device_count()
        gpus = tuple(named.split(",")[:count]) if named else tuple(map(str, range(count)))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(workers=workers or len(gpus) or max(1, cores // 4), gpus=gpus)

    def run(self, jobs: Sequence[Job]) -> Generator[Event, None, None]:
        """Makes the runs and yields their events. Closing the generator ends all workers.

        A worker that dies (out of memory, a crash in a library) counts as a failure of its run only.
        """
        # Without GPUs, a fork of a process that has imported everything starts at once; CUDA does not survive a fork.
        context: Any = multiprocessing.get_context("spawn" if self.gpus else "forkserver")
        if not self.gpus:
            context.set_forkserver_preload(_PRELOAD)
        waiting = deque((job, 1) for job in jobs)
        free = deque(range(self.workers))
        busy: dict[Connection, _Worker] = {}
        idle: dict[Connection, _Worker] = {}
        try:
            while waiting or busy:
                while waiting and (idle or free):
                    job, attempt = _next(waiting)
                    connection, worker = idle.popitem() if idle else self._start(context, free.popleft())
                    worker.job, worker.attempt = job, attempt
                    with suppress(OSError):  # it has died in the meantime; its connection reports the end
                        connection.send(job)
                    busy[connection] = worker
                    yield Event(kind="started", run=job.name, attempt=attempt)
                for ready in wait(list(busy), timeout=1.0):
                    assert isinstance(ready, Connection)
                    event = _event(ready, busy[ready])
                    if event.kind != "step":
                        worker = busy.pop(ready)
                        if self.gpus and event.kind in ("finished", "found"):
                            idle[ready] = worker
                        else:
                            _dismiss(ready, worker)
                            free.append(worker.slot)
                        if event.kind == "retried":
                            waiting.append((worker.job, worker.attempt + 1))
                    yield event
        finally:
            for connection, worker in idle.items():
                _dismiss(connection, worker)
            _stop([worker.process for worker in busy.values()])

    def _start(self, context: Any, slot: int) -> tuple[Connection, _Worker]:
        ours, theirs = context.Pipe()
        gpu = self.gpus[slot % len(self.gpus)] if self.gpus else None
        threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // self.workers))
        process = context.Process(target=work, args=(theirs, gpu, threads), daemon=True)
        process.start()
        theirs.close()
        return ours, _Worker(process, slot)


def _next(waiting: deque[tuple[Job, int]]) -> tuple[Job, int]:
    """Takes the next run that no other sweep is making; the first one if all are taken, to wait for its result."""
    number = next((number for number, (job, _) in enumerate(waiting) if not is_locked(job.lock)), 0)
    taken = waiting[number]
    del waiting[number]
    return taken


def _dismiss(connection: Connection, worker: _Worker) -> None:
    """Ends a worker that has nothing to do."""
    with suppress(OSError):
        connection.send(None)
    worker.process.join()
    connection.close()


def _stop(processes: list[Any]) -> None:
    """Stops busy workers; each has some time to write a checkpoint."""
    for process in processes:
        process.terminate()
    limit = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
        process.kill()
        process.join()


def _event(connection: Connection, worker: _Worker) -> Event:
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        message = ("failed", f"the process died with exit code {worker.process.exitcode}", True)
    if message[0] == "step":
        return Event(kind="step", run=worker.job.name, attempt=worker.attempt, step=message[1], total=message[2])
    return Event.of_outcome(worker.job, worker.attempt, message)
