"""One process at a time: file locks that the system releases however a process ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from deltasam.lab.experiments._errors import LockedError

LOCK = ".lock"
"""The lock file of a run folder; a finished run has none."""
PATIENCE = 10.0  # seconds: data loader workers of a killed run hold its lock until they notice and end

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Locks a run folder against other processes that would make the same run.

    Of the processes of ``torchrun``, the first one holds the lock.

    Raises:
        LockedError: Another process holds it.
    """
    if int(os.environ.get("RANK", "0")):
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(folder / LOCK, timeout=PATIENCE))
        except Timeout:
            raise LockedError(
                f"{folder}: another process is making this run; wait for it, or choose another folder by --output"
            ) from None
        yield
        if (folder / "result.json").is_file():  # other processes find the result from now on
            (folder / LOCK).unlink(missing_ok=True)


@contextmanager
def lock(path: Path, *, timeout: float = -1) -> Iterator[None]:
    """Locks a file for as long as the context lasts. On a file system without locks it does nothing.

    Args:
        path: The lock file; created if missing.
        timeout: Seconds to wait for another process; -1 waits as long as it takes.

    Raises:
        filelock.Timeout: Another process still holds the lock.
    """
    file = FileLock(path, timeout=timeout)
    try:
        file.acquire()
    except (NotImplementedError, OSError) as error:  # NotImplementedError: filelock before 3.13 for ENOSYS
        if isinstance(error, Timeout) or (isinstance(error, OSError) and error.errno not in _NO_LOCKS):
            raise
    try:
        yield
    finally:
        file.release()


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock at this moment."""
    try:
        if path.is_file():
            with lock(path, timeout=0):
                pass
    except Timeout:
        return True
    return False
