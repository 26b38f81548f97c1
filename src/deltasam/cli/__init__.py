"""The command ``deltasam``: every command is a typed frozen dataclass in a file of its own, listed in ``_commands``."""

from deltasam.cli._errors import CommandError
from deltasam.cli._main import main

__all__ = ["CommandError", "main"]
