"""The package and the command line import heavy modules only when they are needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "transformers", "datasets", "matplotlib", "pandas", "rich", "pydantic")


def loaded_after(code: str) -> set[str]:
    """Returns the heavy modules that this code imports."""
    check = f"import sys; print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, check=True)
    return set(result.stderr.split())


def test_import_of_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import deltasam; dir(deltasam)") == set()


def test_a_method_loads_nothing_heavy_beyond_torch() -> None:
    forget = "import torch, sys; [sys.modules.pop(name) for name in HEAVY if name in sys.modules and name != 'torch']"
    code = f"HEAVY = {HEAVY!r}\n{forget}\nfrom deltasam import SAM"
    assert loaded_after(code) == {"torch"}


def test_help_loads_nothing_heavy() -> None:
    assert loaded_after("from deltasam.lab.cli import main; main(['--help'])") == set()


@pytest.mark.parametrize("command", ["env", "bench step", "bench train", "list methods"])
def test_help_of_a_command_does_not_load_torch(command: str) -> None:
    code = f"""
from deltasam.lab.cli import main
try:
    main({[*command.split(), "--help"]!r})
except SystemExit as end:
    assert end.code == 0, end
"""
    assert "torch" not in loaded_after(code)


@pytest.mark.parametrize("what", ["methods", "regularisers"])
def test_lists_are_read_from_the_sources(what: str) -> None:
    assert "torch" not in loaded_after(f"from deltasam.lab.cli import main; assert main(['list', '{what}']) == 0")
