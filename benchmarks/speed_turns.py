"""Processes that prepare at the same time and then measure one after the other."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Turns:
    """``number`` processes prepare in parallel and then measure one after the other; they meet in a folder.

    Compiling takes a minute of one core, measuring some seconds of the whole GPU: all compile at once, and no
    measurement starts before the last one is ready.
    """

    folder: Path
    number: int
    name: str

    def arrive(self) -> None:
        """Marks this process as ready: it no longer disturbs the others."""
        (self.folder / f"{self.name}.ready").touch()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until all are ready, then for its turn."""
        self.arrive()
        while len(list(self.folder.glob("*.ready"))) < self.number:
            time.sleep(0.1)
        with (self.folder / "turn").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def side_by_side(script: str, commands: Sequence[Sequence[str]]) -> None:
    """Runs the script once for each set of arguments, all at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = ["--meet", folder, str(len(commands))]
        running = [
            subprocess.Popen([sys.executable, script, *each, *meeting, str(number)])
            for number, each in enumerate(commands)
        ]
        while any(process.poll() is None for process in running):
            for number, process in enumerate(running):
                if process.poll() is not None:  # finished or killed: the others do not wait for it
                    Turns(Path(folder), len(running), str(number)).arrive()
            time.sleep(0.1)
