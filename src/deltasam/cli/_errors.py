"""The error a command raises for a mistake of its user."""

from __future__ import annotations


class CommandError(Exception):
    """A mistake the user can mend: its message is shown without a traceback, and the exit code is 1."""
