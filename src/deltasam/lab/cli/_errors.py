"""The errors a command raises for a mistake of its user."""

from __future__ import annotations

from typing import ClassVar


class CommandError(Exception):
    """A mistake the user can mend: its message is shown without a traceback, and the exit code is 1."""

    exit_code: ClassVar[int] = 1


class StoppedError(CommandError):
    """The run was told to stop and wrote a checkpoint: the exit code is 75, "try again" (EX_TEMPFAIL)."""

    exit_code: ClassVar[int] = 75


class InputError(CommandError):
    """Bad input, found before anything was done: the exit code is 2, as for an unknown option."""

    exit_code: ClassVar[int] = 2
