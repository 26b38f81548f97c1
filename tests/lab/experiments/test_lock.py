"""File locks: one process at a time, released however a process ends."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import filelock
import pytest

from deltasam.lab.experiments import LockedError
from deltasam.lab.experiments.lock import LOCK, is_locked, lock, lock_run


def hold(path: Path, connection: Any) -> None:
    with lock(path):
        connection.send("locked")
        signal.pause()


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """A process that holds the lock of a run folder until it is killed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path / LOCK, theirs), daemon=True)
    process.start()
    assert ours.recv() == "locked"
    yield process
    process.kill()
    process.join()


def test_another_process_waits_until_the_holder_is_killed(
    holder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasam.lab.experiments.lock.PATIENCE", 0.1)
    assert is_locked(tmp_path / LOCK)
    with pytest.raises(LockedError, match=f"{tmp_path}.*--output"), lock_run(tmp_path):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert not is_locked(tmp_path / LOCK)
    with lock_run(tmp_path):
        assert is_locked(tmp_path / LOCK)


def test_a_timeout_inside_of_a_run_is_not_taken_for_its_lock(tmp_path: Path) -> None:
    with pytest.raises(filelock.Timeout), lock_run(tmp_path):
        raise filelock.Timeout("a cache of the hub")


def test_only_the_first_process_of_torchrun_locks(
    holder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with lock_run(tmp_path):
        pass


def test_a_finished_run_has_no_lock_file(tmp_path: Path) -> None:
    with lock_run(tmp_path):
        pass
    assert (tmp_path / LOCK).exists()
    with lock_run(tmp_path):
        (tmp_path / "result.json").touch()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EACCES])
def test_a_file_system_without_locks(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(filelock.FileLock, "acquire", fail)
    if number == errno.ENOLCK:
        with lock(tmp_path / LOCK):
            pass
    else:
        with pytest.raises(PermissionError), lock(tmp_path / LOCK):
            pass
