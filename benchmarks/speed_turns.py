"""Processes that get ready side by side and measure one after the other.

Compiling a model takes a minute of one core, measuring it some seconds of the whole GPU: with a process for each
measurement the machine compiles all of them at once, and no clock runs before the last one is ready.
"""

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
    """The place where ``number`` processes meet."""

    folder: Path
    number: int
    name: str

    def arrive(self) -> None:
        """Says that this process will not disturb the others any more."""
        (self.folder / f"{self.name}.ready").touch()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits for all to be ready, then for those whose turn it is."""
        self.arrive()
        while len(list(self.folder.glob("*.ready"))) < self.number:
            time.sleep(0.1)
        with (self.folder / "turn").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def side_by_side(script: str, commands: Sequence[Sequence[str]]) -> None:
    """Runs the script once with each set of arguments; each is told where to meet the others."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = ["--meet", folder, str(len(commands))]
        running = [
            subprocess.Popen([sys.executable, script, *each, *meeting, str(number)])
            for number, each in enumerate(commands)
        ]
        while any(process.poll() is None for process in running):
            for number, process in enumerate(running):
                if process.poll() is not None:  # also one that was killed: the others do not wait for it
                    Turns(Path(folder), len(running), str(number)).arrive()
            time.sleep(0.1)
