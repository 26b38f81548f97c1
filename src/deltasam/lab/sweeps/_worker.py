"""One run in a process of its own: locked against a second one, and gone when the sweep is gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from deltasam.lab.plugins import VARIABLE

_TELL_EVERY = 0.25  # seconds


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process needs to know to make one run.

    Attributes:
        name: Name of the run and of its folder.
        config: The run as plain data.
        folder: Folder of the sweep.
        keep: What stays of the finished run.
        risk: Options of the adversarial risk to measure, or None.
        plugins: Modules of the user's own, as the sweep's process has them in ``DELTASAM_PLUGINS``.
    """

    name: str
    config: dict[str, Any] = field(repr=False)
    folder: Path
    keep: str = "weights"
    risk: dict[str, Any] | None = None
    plugins: str = ""

    @property
    def place(self) -> Path:
        """The run folder."""
        return self.folder / self.name

    @property
    def lock(self) -> Path:
        """Locked by the process that makes the run."""
        return self.folder / "locks" / f"{self.name}.lock"

    @property
    def failure(self) -> Path:
        """Where the traceback of a failed run is kept."""
        return self.folder / "failures" / f"{self.name}.txt"


def work(job: Job | None, connection: Connection, more: Connection, gpu: str | None, threads: int) -> None:
    """The process: makes a run, and those that come by ``more`` until that ends, and tells ``connection`` how it goes.

    Messages: ``("step", step, total, latest)``, then what :func:`attempt` gives. After a failure the process ends:
    nobody knows what state it is in.
    """
    os.setsid()  # Ctrl-C is for the sweep, which ends its processes itself
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    threading.Thread(target=_end_with_the_sweep, args=(connection,), daemon=True).start()
    while job is not None and _worked(job, connection, threads):
        job = _next(more)


def _next(more: Connection) -> Job | None:
    """The next run, or None when there will be no other."""
    try:
        found: Job = more.recv()
    except EOFError:
        return None
    return found


def _worked(job: Job, connection: Connection, threads: int) -> bool:
    """Makes one run and says whether it went well."""
    from deltasam.lab.experiments._errors import RunStoppedError

    with _log(job.folder / "logs" / f"{job.name}.log"):
        well = False
        try:
            message = attempt(job, threads, connection.send)
            connection.send(message)
            well = message[0] == "finished"
        except RunStoppedError:  # the sweep is ending; the run goes on from its checkpoint next time
            pass
        sys.stdout.flush()
        sys.stderr.flush()
    return well


def attempt(job: Job, threads: int, tell: Callable[[tuple[Any, ...]], object]) -> tuple[Any, ...]:
    """What becomes of a run: ``("finished", trained, metric, value)``, or ``("failed", error, another try may help)``.

    Raises:
        RunStoppedError: The run was told to stop.
    """
    from deltasam.lab.experiments._errors import RunStoppedError
    from deltasam.lab.sweeps._again import may_end_otherwise

    try:
        return "finished", *make(job, threads, tell)
    except RunStoppedError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever went wrong is recorded, and the sweep goes on
        job.failure.parent.mkdir(exist_ok=True)
        job.failure.write_text(traceback.format_exc(), encoding="utf-8")
        return "failed", f"{type(error).__name__}: {error}", may_end_otherwise(error)


def make(job: Job, threads: int, tell: Callable[[tuple[Any, ...]], object]) -> tuple[bool, str, float]:
    """Makes the run in this process, alone among all processes of the machine, unless it is there already.

    Args:
        job: The run.
        threads: Threads of torch.
        tell: Called with ``("step", step, total, latest)`` now and then.

    Returns:
        Whether it was trained now, the name of the primary metric, and its value.
    """
    import torch
    import transformers

    from deltasam.lab.experiments._config import RunConfig
    from deltasam.lab.experiments._run import run
    from deltasam.lab.sweeps._measure import record_risk

    # A server of forks may be older than the variable, and a node of a cluster has an environment of its own.
    os.environ[VARIABLE] = job.plugins
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    told = 0.0

    def watch(step: int, total: int, latest: dict[str, float]) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told > _TELL_EVERY or step == total:
            told = now
            tell(("step", step, total, {"loss": latest["loss"]} if "loss" in latest else {}))

    with _alone(job.lock):
        there = (job.place / "result.json").is_file()
        kept = job.keep != "results" or job.risk is not None  # the risk is measured at the final weights
        result = run(RunConfig.from_plain(job.config), job.place, watch=watch, keep_weights=kept)
        if job.risk is not None and (job.place / "model").is_dir():
            record_risk(job.place, **{"data": job.config.get("data"), **job.risk})
        _tidy(job)
    return not there, result.primary_metric, result.primary_value


def _tidy(job: Job) -> None:
    if job.keep != "all":
        shutil.rmtree(job.place / "checkpoints", ignore_errors=True)
    if job.keep == "results":
        shutil.rmtree(job.place / "model", ignore_errors=True)
    job.failure.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits until no other process makes this run; the system lets go of the lock however a process ends."""
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_taken(job: Job) -> bool:
    """Whether another process makes the run at this moment."""
    try:
        with job.lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nobody has made it yet, or there are no locks here: who makes it will find out
        return False
    return False


@contextlib.contextmanager
def _log(path: Path) -> Iterator[None]:
    """Sends what is printed, also by libraries outside Python, to a file: the terminal belongs to the sweep."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        yield


def _end_with_the_sweep(connection: Connection) -> None:
    """The sweep sends nothing: the connection becomes readable when the sweep has ended, even by a kill."""
    with contextlib.suppress(OSError):
        connection.poll(None)
    os._exit(1)
