"""Measurements on the final weights of runs: which runs, and what to do about those that cannot be measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError, one_line_errors
from deltasam.lab.cli._output import print_note

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class OnRuns:
    """Options of all measurements on runs."""

    folders: Positional[tuple[Path, ...]]
    """Run folders, or folders that contain some at any depth."""

    rows: int = 256
    """Size of the fixed random sample of rows."""

    batch_size: int = 16
    """Instances per batch."""

    data: Path | None = None
    """Folder with the datasets. Defaults to the one that the run used."""

    @property
    def data_folder(self) -> str | None:
        """The folder with the datasets, independent of the working directory."""
        return None if self.data is None else str(self.data.resolve())

    def runs(self) -> list[Path]:
        """Returns the run folders. A folder without any stays in the list and is reported when it is measured.

        Raises:
            InputError: No folder is given, or one does not exist.
        """
        from deltasam.lab.report import run_folders

        if not self.folders:
            raise InputError("give at least one run folder, or a folder that contains some")
        for folder in self.folders:
            if not folder.exists():
                raise InputError(f"{folder}: no run folder, it does not exist")
        return list(dict.fromkeys(run for folder in self.folders for run in (run_folders(folder) or [folder])))


def check_folders(folders: Sequence[Path]) -> None:
    """Raises an InputError for a folder that does not exist."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; `deltasam train` and `deltasam sweep` create run folders")


def each_run(
    runs: Sequence[Path], measure: Callable[[Path], Found], *, others: bool = False
) -> Iterator[tuple[Path, Found]]:
    """Measures the runs one by one. If there are several, skips those that cannot be measured, with a message.

    A run cannot be measured if it is not finished, has no weights, has damaged weights or data, has diverged, or has a
    method that the measurement does not apply to.

    Args:
        runs: The run folders.
        measure: Measures one of them.
        others: Whether there are further runs, which are measured already.

    Raises:
        InputError: None of the runs can be measured.
    """
    from deltasam.lab.experiments import ConfigError, DivergedError

    refused: list[str] = []
    with one_line_errors():
        for number, run in enumerate(runs, 1):
            print_note(f"[{number}/{len(runs)}] {run.name}")
            try:
                found = measure(run)
            except (ConfigError, DivergedError) as error:
                refused.append(str(error))
            except ValueError as error:  # including DataError
                refused.append(f"{run}: {error}")
            else:
                yield run, found
                continue
            if len(runs) > 1 or others:
                print(f"skipped: {refused[-1]}", file=sys.stderr)
    if refused and len(refused) == len(runs) and not others:
        raise InputError(refused[0])
