"""Processes that make one run after the other, as they do on GPUs."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
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
from deltasam.lab.experiments import ConfigError, DivergedError, LockedError, RunConfig, run
from deltasam.lab.experiments.lock import lock
from deltasam.lab.plugins import PluginError
from deltasam.lab.sweeps import Job, LocalPool, _pool, _ray, _worker, read_sweep, run_sweep
from deltasam.lab.tasks import DataError
from helpers.pretrained import bert_folder


def sweep(folder: Path, **changes: Any) -> Any:
    rows = ["text,label", *(f"{'the cat sat' if i % 2 else 'a dog ran'} {i},{i % 2}" for i in range(24))]
    (folder / "rows.csv").write_text("\n".join(rows))
    files = dict.fromkeys(("train", "validation"), str(folder / "rows.csv"))
    task = {"name": "classification", "files": files, "text": "text", "label": "label", "max_length": 24}
    common = {"schedule": {"steps": 3}, "batch": {"size": 8}, "evaluate_every": "end", "checkpoint_every": "never"}
    model = str(bert_folder(folder / "bert"))
    plain = {"tasks": [task], "models": [model], "methods": ["sam"], "common": common, "seeds": [1, 2]}
    (folder / "s.yaml").write_text(yaml.safe_dump({**plain, "keep": "results", **changes}))
    return read_sweep(folder / "s.yaml")


def losses(folder: Path) -> dict[str, float]:
    found = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/result.json")}
    return {name: result["metrics"]["loss"] for name, result in found.items()}


def test_a_process_makes_all_runs_and_the_second_is_that_of_a_fresh_process(tmp_path: Path) -> None:
    # An empty name of a GPU hides them all: what is tested is the way runs are handed on.
    pool = LocalPool(workers=1, gpus=("",))
    assert not run_sweep(sweep(tmp_path), tmp_path / "both", pool).failed
    assert not run_sweep(sweep(tmp_path, seeds=[2]), tmp_path / "second", pool).failed
    both, second = losses(tmp_path / "both"), losses(tmp_path / "second")
    assert len(set(both.values())) == 2
    assert len(second) == 1
    assert second.items() <= both.items()
    assert not list((tmp_path / "both").glob("*/model"))  # keep: results


def test_what_another_sweep_makes_is_left_to_it_while_there_is_something_else(tmp_path: Path) -> None:
    """Two sweeps with a process each waited for one another run by run, so that one of them did nothing."""
    jobs = [Job(name=name, config={}, folder=tmp_path) for name in "abc"]
    waiting = deque((job, 1) for job in jobs)
    jobs[0].lock.parent.mkdir()
    with lock(jobs[0].lock):
        assert _pool._next(waiting) == (jobs[1], 1)
        with lock(jobs[2].lock):
            assert _pool._next(waiting) == (jobs[0], 1)  # there is nothing else to do but to wait
    assert _pool._next(waiting) == (jobs[2], 1)


@pytest.mark.slow
def test_after_a_failure_another_process_goes_on(tmp_path: Path) -> None:
    methods = {"broken": {"method": "sam", "batch": {"size": 25, "drop_last": True}}, "erm": "erm"}
    outcome = run_sweep(sweep(tmp_path, methods=methods), tmp_path / "out", LocalPool(workers=1, gpus=("",)))
    assert len(outcome.failed) == 2
    assert len(losses(tmp_path / "out")) == 2


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def answered(status: int) -> Exception:
    """What the hub's client raises for an answer, without the client, which has changed its library twice."""
    error = OSError(f"{status}")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


class NetworkError(Exception):
    __module__ = "httpx"


def in_the_course_of(error: Exception, earlier: Exception) -> Exception:
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
    (caused(DataError("no tokenizer"), in_the_course_of(OSError("no vocabulary"), TimeoutError())), True),
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
def test_only_what_may_end_otherwise_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool
) -> None:
    monkeypatch.setattr(_worker, "make", failing(error))
    job = Job(name="one", config={}, folder=tmp_path)
    assert _worker.attempt(job, 1, print) == ("failed", f"{type(error).__name__}: {error}", again)
    assert str(error) in job.failure.read_text()


class FakeRay:
    """As much of Ray as tells what became of a task."""

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
        (("finished", True, "accuracy", 0.5), 1, 0, "finished", None),
        (("finished", False, "accuracy", 0.5), 1, 0, "found", None),
        (("failed", "RuntimeError: x", True), 1, 0, "retried", (2, 0)),
        (("failed", "RuntimeError: x", True), 2, 0, "failed", None),
        (("failed", "ConfigError: x", False), 1, 0, "failed", None),
        (LookupError("a node died"), 1, 3, "retried", (1, 4)),
        (LookupError("a node died"), 1, 4, "failed", None),
    ],
)
def test_what_becomes_of_a_run_on_a_cluster(
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
    connection.send(("finished", True, "accuracy", 0.5))


def test_a_process_that_died_is_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    connection.send(("finished", True, "accuracy", 0.5))


def test_a_process_that_died_while_it_had_nothing_to_do_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_run_ends_with_its_sweep_however_long_it_would_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    ours.close()  # as the system does when the sweep is killed
    process.join(300)
    assert process.exitcode == 1


def test_tf32_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    config = RunConfig.from_plain({"task": "cola", "model": str(bert_folder(tmp_path / "b")), "precision": "tf32"})
    with pytest.raises(ConfigError, match="precision=tf32: needs a CUDA device; use fp32"):
        run(config, tmp_path / "run")
