"""Errors that a user can fix, reported in one line without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class CommandError(Exception):
    """An error that the user can fix. Exit code 1."""

    exit_code: ClassVar[int] = 1


class StoppedError(CommandError):
    """The run was stopped from outside and wrote a checkpoint. Exit code 75, "try again" (EX_TEMPFAIL)."""

    exit_code: ClassVar[int] = 75


class InputError(CommandError):
    """Bad input, found before any work was done. Exit code 2, as for an unknown option."""

    exit_code: ClassVar[int] = 2


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns errors of configuration, data, storage and training into a :class:`CommandError`."""
    from deltasam.integrations import LostError
    from deltasam.integrations.storage import StorageError
    from deltasam.lab.experiments import ConfigError, DivergedError, RunStoppedError
    from deltasam.lab.tasks import DataError

    try:
        yield
    except (ConfigError, DataError) as error:
        raise InputError(str(error)) from error
    except RunStoppedError as error:
        raise StoppedError(str(error)) from error
    except (StorageError, DivergedError, LostError) as error:
        raise CommandError(str(error)) from error
