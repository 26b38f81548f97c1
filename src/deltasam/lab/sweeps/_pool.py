"""Many runs on one machine: processes that share out the GPUs, a second try for what it may help."""

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

from deltasam.lab.sweeps._worker import Job, is_taken, work

ATTEMPTS = 2
GRACE = 15.0  # seconds that a run has for its checkpoint when the sweep is stopped


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something happened to a run.

    Attributes:
        kind: ``started``, ``step``, ``finished`` (trained now), ``found`` (was there), ``retried`` or ``failed``.
        run: Name of the run.
        attempt: 1, or 2 for the second try.
        step: Update, for ``step``.
        total: Updates in all, for ``step``.
        metric: Primary metric, for ``finished`` and ``found``.
        value: Its value.
        error: What went wrong, for ``retried`` and ``failed``.
    """

    kind: str
    run: str
    attempt: int
    step: int = 0
    total: int = 0
    metric: str = ""
    value: float | None = None
    error: str = ""


@dataclass
class _Active:
    job: Job
    attempt: int
    slot: int
    process: Any
    more: Connection  # further runs for the process


@dataclass(frozen=True, kw_only=True)
class LocalPool:
    """Processes of this machine.

    Attributes:
        workers: Runs at a time; by default one per GPU, or one per four cores where there is none.
        gpus: The GPUs, as ``CUDA_VISIBLE_DEVICES`` names them; runs are dealt out to them in turn.
        reuse: On GPUs, where a process takes long to start, let it make one run after the other. A run sets the seeds
            and the precision it needs, so it is the same in a fresh process.
    """

    workers: int
    gpus: tuple[str, ...] = field(default=())
    reuse: bool = True

    @classmethod
    def find(cls, workers: int | None = None) -> LocalPool:
        """What this machine has."""
        import torch

        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = torch.cuda.device_count()
        gpus = tuple(named.split(",")[:count]) if named else tuple(map(str, range(count)))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(workers=workers or len(gpus) or max(1, cores // 4), gpus=gpus)

    def run(self, jobs: Sequence[Job]) -> Generator[Event, None, None]:
        """Makes the runs and yields what happens. Closing the generator ends all processes.

        A process that dies (out of memory, a crash below Python) counts as a failed run like any other.
        """
        # Without a GPU a fork of a process that has imported everything starts at once; CUDA does not survive a fork.
        context: Any = multiprocessing.get_context("spawn" if self.gpus else "forkserver")
        if not self.gpus:
            context.set_forkserver_preload(["deltasam.lab.experiments._run", "deltasam.lab.experiments._trainer"])
        waiting = deque((job, 1) for job in jobs)
        free = deque(range(self.workers))
        active: dict[Connection, _Active] = {}
        idle: dict[Connection, _Active] = {}
        try:
            while waiting or active:
                while waiting and (idle or free):
                    job, attempt = _take(waiting)
                    if idle:
                        connection, started = idle.popitem()
                        started.job, started.attempt = job, attempt
                        with suppress(OSError):  # it has died in the meantime, as the end of its connection tells
                            started.more.send(job)
                    else:
                        connection, started = self._start(context, job, attempt, free.popleft())
                    active[connection] = started
                    yield Event(kind="started", run=job.name, attempt=attempt)
                for ready in wait(list(active), timeout=1.0):
                    assert isinstance(ready, Connection)
                    event = _receive(ready, active[ready])
                    if event.kind != "step":
                        ended = active.pop(ready)
                        if self.reuse and self.gpus and event.kind in ("finished", "found"):
                            idle[ready] = ended
                        else:
                            _dismiss(ended, ready)
                            free.append(ended.slot)
                        if event.kind == "retried":
                            waiting.append((ended.job, ended.attempt + 1))
                    yield event
        finally:
            for connection, one in idle.items():
                _dismiss(one, connection)
            _end([one.process for one in active.values()])

    def _start(self, context: Any, job: Job, attempt: int, slot: int) -> tuple[Connection, _Active]:
        ours, theirs = context.Pipe()
        further, more = context.Pipe(duplex=False)
        gpu = self.gpus[slot % len(self.gpus)] if self.gpus else None
        cores = os.cpu_count() or 1
        threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // self.workers))
        process = context.Process(target=work, args=(job, theirs, further, gpu, threads), daemon=True)
        process.start()
        theirs.close()
        further.close()
        return ours, _Active(job, attempt, slot, process, more)


def _take(waiting: deque[tuple[Job, int]]) -> tuple[Job, int]:
    """The next run that no other sweep makes just now; the first where others make all, to wait for its result."""
    number = next((number for number, (job, _) in enumerate(waiting) if not is_taken(job)), 0)
    taken = waiting[number]
    del waiting[number]
    return taken


def _dismiss(one: _Active, connection: Connection) -> None:
    """Lets a process end that has nothing to do."""
    one.more.close()
    one.process.join()
    connection.close()


def _end(processes: list[Any]) -> None:
    """Lets every run write a checkpoint, for a while."""
    for process in processes:
        process.terminate()
    limit = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
        process.kill()
        process.join()


def _receive(connection: Connection, run: _Active) -> Event:
    name, attempt = run.job.name, run.attempt
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        run.process.join()
        message = ("failed", f"the process died with exit code {run.process.exitcode}", True)
    if message[0] == "step":
        return Event(kind="step", run=name, attempt=attempt, step=message[1], total=message[2])
    if message[0] == "finished":
        kind = "finished" if message[1] else "found"
        return Event(kind=kind, run=name, attempt=attempt, metric=message[2], value=message[3])
    kind = "retried" if message[2] and attempt < ATTEMPTS else "failed"
    return Event(kind=kind, run=name, attempt=attempt, error=message[1])
