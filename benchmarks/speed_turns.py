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

    def arrive(self, stage: str = "ready") -> None:
        """Marks this process as ready: it no longer disturbs the others."""
        (self.folder / f"{self.name}.{stage}").touch()

    def meet(self, stage: str = "ready") -> None:
        """Waits until all have arrived at this stage or have ended."""
        self.arrive(stage)
        while len({path.name.partition(".")[0] for path in self._marks(stage, "ended")}) < self.number:
            time.sleep(0.1)

    def _marks(self, *stages: str) -> Iterator[Path]:
        return (path for path in self.folder.iterdir() if path.name.partition(".")[2] in stages)

    @contextmanager
    def alone(self, stage: str = "ready") -> Iterator[None]:
        """Waits until all are ready, then for its turn."""
        self.meet(stage)
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
                    Turns(Path(folder), len(running), str(number)).arrive("ended")
            time.sleep(0.1)
