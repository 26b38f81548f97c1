"""The command line and the package answer at once: what they import, and how long it takes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

HEAVY = ("torch", "numpy", "transformers", "datasets", "matplotlib", "pandas", "rich", "pydantic")


def loaded_after(code: str) -> set[str]:
    """The heavy modules that running this code has imported."""
    check = f"import sys; print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, check=True)
    return set(result.stderr.split())


def best_seconds(code: str, repeats: int) -> float:
    """The shortest of some runs: noise of a busy machine only ever adds."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        taken.append(time.perf_counter() - start)
    return min(taken)


def test_import_of_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import deltasam; dir(deltasam)") == set()


def test_a_method_loads_nothing_heavy_beyond_torch() -> None:
    forget = "import torch, sys; [sys.modules.pop(name) for name in HEAVY if name in sys.modules and name != 'torch']"
    code = f"HEAVY = {HEAVY!r}\n{forget}\nfrom deltasam import SAM"
    assert loaded_after(code) == {"torch"}


def test_help_loads_nothing_heavy() -> None:
    assert loaded_after("from deltasam.cli import main; main(['--help'])") == set()


@pytest.mark.parametrize("command", ["env", "bench step", "bench train", "list methods"])
def test_help_of_a_command_does_not_load_torch(command: str) -> None:
    code = f"""
from deltasam.cli import main
try:
    main({[*command.split(), "--help"]!r})
except SystemExit as end:
    assert end.code == 0, end
"""
    assert "torch" not in loaded_after(code)


def test_help_answers_in_well_under_a_second() -> None:
    assert best_seconds("from deltasam.cli import main; main(['--help'])", repeats=3) < 0.6


def test_import_adds_little_to_torch() -> None:
    """Both in one process; beside a fixed bound a share of torch's own import, which a busy machine slows as much."""
    code = """
import time
start = time.perf_counter()
import torch
torch_is_there = time.perf_counter()
import deltasam
package, from_here = time.perf_counter() - torch_is_there, time.perf_counter()
from deltasam import SAM
method = time.perf_counter() - from_here
bound = max(0.2, 0.12 * (torch_is_there - start))
assert package < 0.2, f"import deltasam took {package:.2f} s beyond torch"
assert method < bound, f"the first method took {method:.2f} s beyond torch, the bound is {bound:.2f} s"
"""
    for _ in "ab":  # a second chance: noise only ever adds
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return
    pytest.fail(result.stderr)
