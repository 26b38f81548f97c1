"""The layers of the package, as pyproject.toml draws them."""

from __future__ import annotations

import subprocess
import sys

from helpers.data import REPOSITORY


def test_layers_are_one_way() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout
