"""The pool of local workers: reuse, shared work, retries, dead workers."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from deltasam.integrations.storage import StorageError
from deltasam.lab.experiments import ConfigError, DivergedError, LockedError
from deltasam.lab.experiments.lock import lock
from deltasam.lab.plugins import PluginError
from deltasam.lab.sweeps import Job, LocalPool, RayPool, _pool, _ray, _worker, read_sweep, run_sweep
from deltasam.lab.tasks import DataError
from helpers.folders import classification_task
from helpers.pretrained import bert_folder


def sweep(folder: Path, **changes: Any) -> Any:
    task = classification_task(folder)
    common = {"schedule": {"steps": 3}, "batch": {"size": 8}, "evaluate_every": "end", "checkpoint_every": "never"}
    model = str(bert_folder(folder / "bert"))
    plain = {"tasks": [task], "models": [model], "methods": ["sam"], "common": common, "seeds": [1, 2]}
    (folder / "s.yaml").write_text(yaml.safe_dump({**plain, "keep": "results", **changes}))
    return read_sweep(folder / "s.yaml")


def losses(folder: Path) -> dict[str, float]:
    found = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/result.json")}
    return {name: result["metrics"]["loss"] for name, result in found.items()}


@pytest.mark.slow
def test_a_reused_worker_gives_the_results_of_a_new_one(tmp_path: Path) -> None:
    # An empty GPU name hides all GPUs; this tests how a worker gets several runs.
    pool = LocalPool(workers=1, gpus=("",))
    assert not run_sweep(sweep(tmp_path), tmp_path / "both", pool).failed
    assert not run_sweep(sweep(tmp_path, seeds=[2]), tmp_path / "second", pool).failed
    both, second = losses(tmp_path / "both"), losses(tmp_path / "second")
    assert len(set(both.values())) == 2
    assert len(second) == 1
    assert second.items() <= both.items()
    assert not list((tmp_path / "both").glob("*/model"))  # keep: results


def test_runs_that_another_sweep_is_making_come_last(tmp_path: Path) -> None:
    jobs = [Job(name=name, config={}, folder=tmp_path) for name in "abc"]
    waiting = deque((job, 1) for job in jobs)
    jobs[0].lock.parent.mkdir()
    with lock(jobs[0].lock):
        assert _pool._next(waiting) == (jobs[1], 1)
        with lock(jobs[2].lock):
            assert _pool._next(waiting) == (jobs[0], 1)  # nothing else is left
    assert _pool._next(waiting) == (jobs[2], 1)


@pytest.mark.slow
def test_after_a_failure_another_process_continues(tmp_path: Path) -> None:
    methods = {"broken": {"method": "sam", "batch": {"size": 25, "drop_last": True}}, "erm": "erm"}
    outcome = run_sweep(sweep(tmp_path, methods=methods), tmp_path / "out", LocalPool(workers=1, gpus=("",)))
    assert len(outcome.failed) == 2
    assert len(losses(tmp_path / "out")) == 2


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def answered(status: int) -> Exception:
    """The error of the hub's client for a response; the client itself has changed its library twice."""
    error = OSError(f"{status}")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


class NetworkError(Exception):
    __module__ = "httpx"


def with_context(error: Exception, earlier: Exception) -> Exception:
    error.__context__ = earlier
    return error


ERRORS = [
    (ConfigError("batch.size=25 leaves no batch"), False),
    (DataError("model 'gone': there is no such folder"), False),
    (PluginError("own.py cannot be imported"), False),
    (DivergedError("25 updates in a row"), False),
    (caused(DataError("mrpc could not be loaded from the hub"), ConnectionError("reset")), True),
    (caused(DataError("no tokenizer"), caused(OSError("the hub"), TimeoutError())), True),
    (caused(DataError("no tokenizer"), OSError("not a valid model identifier")), False),
    (caused(DataError("mrpc"), caused(OSError("a specific connection error"), answered(503))), True),
    (caused(DataError("mrpc"), answered(500)), True),
    (caused(DataError("mrpc"), answered(429)), True),
    (caused(DataError("no tokenizer"), caused(OSError("not a valid model identifier"), answered(404))), False),
    (caused(DataError("no tokenizer"), answered(401)), False),
    (caused(DataError("mrpc"), NetworkError("the peer closed the connection")), True),
    (caused(DataError("no tokenizer"), with_context(OSError("no vocabulary"), TimeoutError())), True),
    (caused(DataError("train.jsonl: cannot be read"), OSError(errno.EIO, "Input/output error")), True),
    (caused(DataError("train.jsonl: cannot be read"), OSError(errno.EACCES, "Permission denied")), False),
    (caused(DataError("no model"), RuntimeError("DefaultCPUAllocator: can't allocate memory")), True),
    (caused(DataError("no model"), RuntimeError("size mismatch")), False),
    (caused(PluginError("own.py cannot be imported"), MemoryError()), True),
    (LockedError("another process is making this run"), True),
    (StorageError("the disk is full"), True),
    (torch.OutOfMemoryError("out of memory"), True),
    (RuntimeError("a bug, or the device"), True),
]


def failing(error: Exception) -> Callable[..., Any]:
    def make(*_: Any) -> Any:
        raise error

    return make


@pytest.mark.parametrize(("error", "again"), ERRORS, ids=lambda value: type(value).__name__)
def test_only_errors_that_may_pass_are_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool
) -> None:
    monkeypatch.setattr(_worker, "make", failing(error))
    job = Job(name="one", config={}, folder=tmp_path)
    assert _worker.attempt(job, 1, print) == ("failed", f"{type(error).__name__}: {error}", again)
    assert str(error) in job.failure.read_text()


class FakeRay:
    """The part of Ray that returns the outcome of a task."""

    class exceptions:  # noqa: N801 - a module there
        RayTaskError = KeyError
        RayError = LookupError

    @staticmethod
    def get(ref: Any) -> Any:
        if isinstance(ref, Exception):
            raise ref
        return ref


@pytest.mark.parametrize(
    ("ref", "attempt", "lost", "kind", "following"),
    [
        (("finished", True, "accuracy", 0.5, ""), 1, 0, "finished", None),
        (("finished", False, "accuracy", 0.5, ""), 1, 0, "found", None),
        (("failed", "RuntimeError: x", True), 1, 0, "retried", (2, 0)),
        (("failed", "RuntimeError: x", True), 2, 0, "failed", None),
        (("failed", "ConfigError: x", False), 1, 0, "failed", None),
        (LookupError("a node died"), 1, 3, "retried", (1, 4)),
        (LookupError("a node died"), 1, 4, "failed", None),
    ],
)
def test_outcomes_on_a_cluster(
    tmp_path: Path, ref: Any, attempt: int, lost: int, kind: str, following: tuple[int, int] | None
) -> None:
    job = Job(name="one", config={}, folder=tmp_path)
    event, again = _ray._outcome(FakeRay, ref, job, attempt, lost)
    assert (event.kind, event.attempt, again) == (kind, attempt, following)


def dying(connection: Any, gpu: str | None, threads: int) -> None:
    """A process that is killed, as by the system when memory is short: in its first attempt, or always."""
    job = connection.recv()
    tries = job.folder / job.name
    tries.write_text(tries.read_text() + "x" if tries.is_file() else "x")
    if job.name == "always" or tries.read_text() == "x":
        os._exit(9)
    connection.send(("finished", True, "accuracy", 0.5, ""))


def test_the_run_of_a_dead_worker_is_retried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasam.lab.sweeps._pool.work", dying)
    jobs = [Job(name=name, config={}, folder=tmp_path) for name in ("always", "once")]
    events = list(LocalPool(workers=1).run(jobs))
    for name, last in (("always", "failed"), ("once", "finished")):
        of_one = [event for event in events if event.run == name]
        assert [event.kind for event in of_one] == ["started", "retried", "started", last]
        assert [event.attempt for event in of_one] == [1, 1, 2, 2]
        assert of_one[1].error == "the process died with exit code 9"


def dying_after(connection: Any, gpu: str | None, threads: int) -> None:
    """A process that makes a run and dies before it gets the next one."""
    connection.recv()
    connection.send(("finished", True, "accuracy", 0.5, ""))


@pytest.mark.slow
def test_an_idle_worker_that_died_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasam.lab.sweeps._pool.work", dying_after)
    jobs = [Job(name=name, config={}, folder=tmp_path) for name in "ab"]
    others, events = multiprocessing.active_children(), []
    for event in LocalPool(workers=1, gpus=("",)).run(jobs):
        events.append((event.run, event.kind))
        if event.kind == "finished":
            for process in set(multiprocessing.active_children()) - set(others):
                process.join()
    assert events == [
        ("a", "started"), ("a", "finished"), ("b", "started"), ("b", "retried"), ("b", "started"), ("b", "finished"),
    ]  # fmt: skip


def test_a_worker_ends_with_its_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"

    def endless(*_: Any) -> Any:
        begun.touch()
        threading.Event().wait()

    monkeypatch.setattr(_worker, "attempt", endless)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def work() -> None:
        ours.close()  # a fork has the sweep's end as well
        _worker.work(theirs, None, 1)

    process = context.Process(target=work, daemon=True)
    process.start()
    ours.send(Job(name="one", config={}, folder=tmp_path))
    while not begun.exists():
        assert process.is_alive()
        time.sleep(0.01)
    ours.close()  # as when the sweep is killed
    process.join(300)
    assert process.exitcode == 1


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379"])
def test_an_unreachable_cluster_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Ray itself would try for a quarter of an hour."""

    def init(**_: Any) -> None:
        raise AssertionError("Ray was asked")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(ConfigError, match=rf"the Ray cluster '{address}' cannot be reached: .*; .*ray start --head"):
        next(RayPool(address=address).run([]))
