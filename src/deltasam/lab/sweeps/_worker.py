"""A process that makes runs of a sweep: one at a time, locked against other sweeps, and ended with the sweep."""

from __future__ import annotations

import contextlib
import os
import queue
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

from deltasam.lab.experiments import Keep, Result, RunConfig, RunFolder, RunStoppedError, run
from deltasam.lab.experiments.lock import lock
from deltasam.lab.plugins import VARIABLE
from deltasam.lab.sweeps._measure import record_risk
from deltasam.lab.sweeps._retry import is_worth_retrying

_REPORT_EVERY = 0.25  # seconds


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of a sweep, as it is sent to a worker.

    Attributes:
        name: Name of the run and of its folder.
        config: The run as plain data.
        folder: Folder of the sweep.
        keep: What is kept of the finished run.
        risk: Options of the adversarial risk to measure, or None.
        plugins: The plugins of the sweep's process, as in ``DELTASAM_PLUGINS``.
    """

    name: str
    config: dict[str, Any] = field(repr=False)
    folder: Path
    keep: Keep = "weights"
    risk: dict[str, Any] | None = None
    plugins: str = ""

    @property
    def run_folder(self) -> Path:
        """The run folder."""
        return self.folder / self.name

    @property
    def lock(self) -> Path:
        """The lock file; a worker holds it while it makes the run."""
        return self.folder / "locks" / f"{self.name}.lock"

    @property
    def failure(self) -> Path:
        """The file with the traceback of a failed run."""
        return self.folder / "failures" / f"{self.name}.txt"


def work(connection: Connection, gpu: str | None, threads: int) -> None:
    """Runs in the worker process: makes the runs that arrive by ``connection`` until None arrives or one fails.

    It sends ``("step", step, total)`` and then the outcome that :func:`attempt` returns. After a failure the process
    ends, since its state is unknown.
    """
    os.setsid()  # Ctrl-C is for the sweep, which ends its workers itself
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
    succeeded = True
    while succeeded and (job := jobs.get()) is not None:
        succeeded = _work_on(job, connection, threads)


def _receive(connection: Connection, jobs: queue.SimpleQueue[Job | None]) -> None:
    """Passes jobs on, and ends the process when the connection breaks: the sweep has ended, perhaps by a kill."""
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)


def _work_on(job: Job, connection: Connection, threads: int) -> bool:
    """Makes one run and returns whether it succeeded."""
    with _output_to(job.folder / "logs" / f"{job.name}.log"):
        succeeded = False
        try:
            outcome = attempt(job, threads, connection.send)
            connection.send(outcome)
            succeeded = outcome[0] == "finished"
        except RunStoppedError:  # the sweep is ending; the run resumes from its checkpoint next time
            pass
        sys.stdout.flush()
        sys.stderr.flush()
    return succeeded


def attempt(job: Job, threads: int, report: Callable[[tuple[Any, ...]], object]) -> tuple[Any, ...]:
    """Makes a run; returns ``("finished", trained, metric, value, note)`` or ``("failed", error, worth retrying)``.

    Raises:
        RunStoppedError: A signal stopped the run.
    """
    try:
        return "finished", *make(job, threads, report)
    except RunStoppedError:
        raise
    except Exception as error:  # noqa: BLE001 - any error is recorded, and the sweep continues
        job.failure.parent.mkdir(exist_ok=True)
        job.failure.write_text(traceback.format_exc(), encoding="utf-8")
        return "failed", f"{type(error).__name__}: {error}", is_worth_retrying(error)


def make(job: Job, threads: int, report: Callable[[tuple[Any, ...]], object]) -> tuple[bool, str, float, str]:
    """Makes the run in this process, unless it is finished; waits while another sweep makes it.

    It calls ``report`` with ``("step", step, total)`` at intervals, and returns whether the run was trained now, the
    name of the primary metric, its value, and what else the user should know.
    """
    import torch
    import transformers

    # The fork server may be older than the variable, and a node of a cluster has its own environment.
    os.environ[VARIABLE] = job.plugins
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    last_report = 0.0

    def watch(step: int, total: int, _latest: dict[str, float]) -> None:
        nonlocal last_report
        now = time.monotonic()
        if now - last_report > _REPORT_EVERY or step == total:
            last_report = now
            report(("step", step, total))

    job.lock.parent.mkdir(exist_ok=True)
    with lock(job.lock):
        finished = (job.run_folder / "result.json").is_file()
        needs_weights = job.keep != "results" or job.risk is not None  # the risk is measured at the final weights
        result = run(RunConfig.from_plain(job.config), job.run_folder, watch=watch, keep_weights=needs_weights)
        if job.risk is not None and (job.run_folder / "model").is_dir():
            record_risk(job.run_folder, **{"data": job.config.get("data"), **job.risk})
        _clean_up(job)
    return not finished, result.primary_metric, result.primary_value, "" if finished else _note(result)


def _note(result: Result) -> str:
    """What the user should know at once: a run that cannot be captured takes several times as long."""
    wanted = result.config["capture"] and not result.device.startswith("cpu")
    return "not captured, its log says why" if wanted and not result.captured_steps else ""


def _clean_up(job: Job) -> None:
    RunFolder(job.run_folder).keep_only(job.keep)
    job.failure.unlink(missing_ok=True)


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Redirects all output, including that of C libraries, to a file: the terminal belongs to the sweep."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        yield
