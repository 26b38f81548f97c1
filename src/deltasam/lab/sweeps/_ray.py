"""Many runs on a Ray cluster: the same jobs and events as on one machine, placed by Ray.

The folder of the sweep must be on a file system that all nodes share.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.sweeps._pool import ATTEMPTS, Event
from deltasam.lab.sweeps._worker import Job, attempt

LOST = 5  # tries of a run whose worker or node died, which is not the run's fault
_PASSED_ON = (
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "DELTASAM_DATA",
    "DELTASAM_MODELS",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)


@dataclass(frozen=True, kw_only=True)
class RayPool:
    """Processes of a Ray cluster.

    Attributes:
        address: The cluster; ``auto`` for the one this machine belongs to, None for one of this machine alone.
        gpus: GPUs of a run; 0.5 lets two runs share one. None takes one where the cluster has any.
        cpus: Cores of a run.
    """

    address: str | None = None
    gpus: float | None = None
    cpus: float = 1.0

    def run(self, jobs: Sequence[Job]) -> Generator[Event, None, None]:
        """Makes the runs and yields what happens; closing the generator cancels what is under way.

        A run that failed is tried once more where that may help, as on one machine. One whose worker or node died is
        placed again, up to five times; it goes on from its last checkpoint.

        Raises:
            ConfigError: Ray is missing or the cluster cannot be reached.
        """
        ray = _connected(self.address)
        gpus = self.gpus if self.gpus is not None else float(ray.cluster_resources().get("GPU", 0) > 0)
        # A fresh process for each run: peak memory is its own, and whatever a run leaves behind goes with it.
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
                    job, tried, lost = under_way.pop(ref)
                    event, again = _outcome(ray, ref, job, tried, lost)
                    if again is not None:
                        under_way[task.remote(job, threads)] = (job, *again)
                    yield event
        finally:
            for ref in under_way:
                ray.cancel(ref, force=True)


def _outcome(ray: Any, ref: Any, job: Job, tried: int, lost: int) -> tuple[Event, tuple[int, int] | None]:
    """What became of a task, and the attempt and number of losses of the next try, if there is one."""
    try:
        message = ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        message = ("failed", f"{type(error.cause).__name__}: {error.cause}", True)
    except ray.exceptions.RayError as error:
        told = f"{type(error).__name__}: the worker or its node died"
        again = (tried, lost + 1) if lost + 1 < LOST else None
        return _failed(job, tried, told, again), again
    if message[0] == "finished":
        kind = "finished" if message[1] else "found"
        return Event(kind=kind, run=job.name, attempt=tried, metric=message[2], value=message[3]), None
    again = (tried + 1, lost) if message[2] and tried < ATTEMPTS else None
    return _failed(job, tried, message[1], again), again


def _failed(job: Job, tried: int, told: str, again: tuple[int, int] | None) -> Event:
    return Event(kind="failed" if again is None else "retried", run=job.name, attempt=tried, error=told)


def _remote(job: Job, threads: int) -> tuple[Any, ...]:
    return attempt(job, threads, lambda message: None)


def _connected(address: str | None) -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("a cluster needs Ray: pip install 'deltasam[cluster]'") from error
    if not ray.is_initialized():
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        try:
            _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": passed_on})
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the Ray cluster {address!r} cannot be reached: {error}; `ray start --head` on one machine makes "
                "one, and says its address"
            ) from error
    return ray


def _knock(address: str | None) -> None:
    """Raises an OSError if nobody listens at ``host:port``: Ray would try it for a quarter of an hour."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()
