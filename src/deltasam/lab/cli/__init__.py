"""The command ``deltasam``. Each subcommand is a frozen dataclass; ``_commands`` lists them."""

from deltasam.lab.cli._errors import CommandError
from deltasam.lab.cli._main import main

__all__ = ["CommandError", "main"]
