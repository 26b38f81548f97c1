"""Makes the runs of a sweep on a Ray cluster, with the same jobs and events as on one machine.

The folder of the sweep must be on a file system that all nodes share.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from deltasam.lab.experiments import ConfigError
from deltasam.lab.sweeps._pool import Event
from deltasam.lab.sweeps._worker import Job, attempt

LOST = 5  # attempts of a run whose worker or node died
_VARIABLES = (
    "HF_HUB_OFFLINE", "HF_HOME", "DELTASAM_DATA", "DELTASAM_MODELS", "PYTHONPATH", "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RayPool:
    """Worker processes on a Ray cluster.

    Attributes:
        address: The cluster; ``auto`` for the one that this machine belongs to, None to start one on this machine.
        gpus: GPUs per run; 0.5 lets two runs share one. None: one if the cluster has any.
        cpus: Cores per run.
    """

    address: str | None = None
    gpus: float | None = None
    cpus: float = 1.0

    def run(self, jobs: Sequence[Job]) -> Generator[Event, None, None]:
        """Makes the runs and yields their events. Closing the generator cancels the runs under way.

        A failed run is retried as on one machine. A run whose worker or node died is placed again, up to five times;
        it resumes from its last checkpoint.

        Raises:
            ConfigError: Ray is missing or the cluster cannot be reached.
        """
        ray = _connect(self.address)
        gpus = self.gpus if self.gpus is not None else float(ray.cluster_resources().get("GPU", 0) > 0)
        # A new process for each run: its peak memory is that of the run, and nothing is left over from an earlier one.
        task = ray.remote(num_cpus=self.cpus, num_gpus=gpus, max_retries=0, max_calls=1)(_remote)
        threads = max(1, int(self.cpus))
        under_way: dict[Any, tuple[Job, int, int]] = {}
        try:
            for job in jobs:
                under_way[task.remote(job, threads)] = (job, 1, 0)
                yield Event(kind="started", run=job.name, attempt=1)
            while under_way:
                ready, _ = ray.wait(list(under_way), num_returns=1, timeout=5.0)
                for ref in ready:
                    job, attempt_number, lost = under_way.pop(ref)
                    event, retry = _outcome(ray, ref, job, attempt_number, lost)
                    if retry is not None:
                        under_way[task.remote(job, threads)] = (job, *retry)
                    yield event
        finally:
            for ref in under_way:
                ray.cancel(ref, force=True)


def _outcome(ray: Any, ref: Any, job: Job, tried: int, lost: int) -> tuple[Event, tuple[int, int] | None]:
    """Returns the event of a task that ended, and the attempt and number of losses of its retry, if there is one."""
    try:
        outcome = ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        outcome = ("failed", f"{type(error.cause).__name__}: {error.cause}", True)
    except ray.exceptions.RayError as error:
        retry = (tried, lost + 1) if lost + 1 < LOST else None
        kind, text = "failed" if retry is None else "retried", f"{type(error).__name__}: the worker or its node died"
        return Event(kind=kind, run=job.name, attempt=tried, error=text), retry
    event = Event.of_outcome(job, tried, outcome)
    return event, (tried + 1, lost) if event.kind == "retried" else None


def _remote(job: Job, threads: int) -> tuple[Any, ...]:
    return attempt(job, threads, lambda message: None)


def _connect(address: str | None) -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("a cluster needs Ray: pip install 'deltasam[cluster]'") from error
    if not ray.is_initialized():
        variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        try:
            _check_reachable(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": variables})
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the Ray cluster {address!r} cannot be reached: {error}; `ray start --head` starts one and prints "
                "its address"
            ) from error
    return ray


def _check_reachable(address: str | None) -> None:
    """Raises an OSError if nothing listens at ``host:port``; Ray itself would try for a quarter of an hour."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()
