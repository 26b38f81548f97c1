"""Measurements on the final weights of runs: which runs, and what to do about those that cannot be measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError, one_line_errors

if TYPE_CHECKING:
    from deltasam.lab.experiments import ConfigError

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


def each_run(runs: Sequence[Path], measure: Callable[[Path], Found]) -> Iterator[tuple[Path, Found]]:
    """Measures the runs one by one. If there are several, skips those that cannot be measured, with a message.

    A run cannot be measured if it is not finished, has no weights, has damaged weights or data, has diverged, or has a
    method that the measurement does not apply to.

    Raises:
        InputError: None of the runs can be measured.
    """
    from deltasam.lab.experiments import ConfigError

    refused: list[ConfigError] = []
    with one_line_errors():
        for run in runs:
            found = result_or_error(measure, run)
            if not isinstance(found, ConfigError):
                yield run, found
                continue
            refused.append(found)
            if len(runs) > 1:
                print(f"skipped: {found}", file=sys.stderr)
        if len(refused) == len(runs):
            raise refused[0]


def result_or_error(measure: Callable[[Path], Found], run: Path) -> Found | ConfigError:
    """Returns the measurement of a run, or the reason why it cannot be measured."""
    from deltasam.lab.experiments import ConfigError, DivergedError

    try:
        return measure(run)
    except ConfigError as error:
        return error
    except DivergedError as error:
        return ConfigError(str(error))
    except ValueError as error:  # including DataError
        return ConfigError(f"{run}: {error}")
