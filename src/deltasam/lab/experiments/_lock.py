"""One process at a time: a folder is held for as long as a run is made in it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltasam.lab.experiments._errors import HeldError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PATIENCE = 10.0  # seconds for what is left of a run that was killed: workers of its data loader hold the folder, too


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a folder against other processes that would make the same run.

    The system lets go of it however the process ends. Of the processes of ``torchrun`` the first one holds it; where
    the file system knows no locks, nobody does.

    Raises:
        HeldError: Another process holds it.
    """
    if fcntl is None or int(os.environ.get("RANK", "0")):
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        limit = time.monotonic() + PATIENCE
        while not _taken(place):
            if time.monotonic() > limit:
                raise HeldError(
                    f"{folder}: another process is making this run; wait for it, or choose another folder by --output"
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(place)


def _taken(place: int) -> bool:
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return True
    return True
