"""The command ``deltasam``: each subcommand is a typed frozen dataclass in a file of its own, see ``_commands``."""

from deltasam.lab.cli._errors import CommandError
from deltasam.lab.cli._main import main

__all__ = ["CommandError", "main"]
