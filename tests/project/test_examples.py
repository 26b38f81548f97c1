"""Every example runs as a script, shortened. Those that need a framework are tested in their rooms."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers.data import REPOSITORY

# example -> arguments that shorten it, and what its output must contain
EXAMPLES = {
    "plain_loop.py": (["--seeds", "1", "--epochs", "1"], "delta-SAM"),
}


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert not [path.name for path in (REPOSITORY / "examples").glob("*.py") if path.name not in tests]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str) -> None:
    arguments, expected = EXAMPLES[name]
    command = [sys.executable, str(REPOSITORY / "examples" / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "120"})
    assert result.returncode == 0, result.stderr
    assert expected in result.stdout
