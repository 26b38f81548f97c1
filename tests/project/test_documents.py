"""Code blocks of the documentation run, docstring examples hold, and no file contains a local path."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest
import torch

import deltasam
from helpers.data import REPOSITORY

PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")])
LOCAL_PATH = re.compile(r"(?<![\w.:/])/(?:root|home|work|tmp|Users)/\w")
CORE = ("methods", "weighting", "per_instance", "objectives", "step", "parallel", "speed", "analysis")


def core_modules() -> list[str]:
    found = (module.name for module in pkgutil.walk_packages(deltasam.__path__, "deltasam."))
    kept = (name for name in found if name.split(".")[1] in CORE and not name.endswith("_kernel"))  # needs Triton
    return ["deltasam", *kept]


@pytest.mark.parametrize("name", core_modules())
def test_docstring_examples_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")  # Lightning, about a page's small loader
@pytest.mark.filterwarnings("ignore:.*GPU available but not used.*")
@pytest.mark.filterwarnings("ignore:.*litlogger.*|.*LitLogger.*")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_python_blocks_of_a_page_run(page: Path) -> None:
    """The blocks of a page run in order, in one namespace, except those marked ``python no-run``."""
    if page.name == "fsdp.md" and not hasattr(torch.cpu.current_stream(), "record_event"):
        pytest.skip("this version of torch cannot shard a model on a CPU")
    namespace: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, str(page), "exec"), namespace)


def tracked_files(*patterns: str) -> list[Path]:
    command = ["git", "-C", str(REPOSITORY), "ls-files", *patterns]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := REPOSITORY / name).is_file()]


def test_no_file_contains_a_path_of_one_machine() -> None:
    texts = tracked_files("*.py", "*.md", "*.toml", "*.yaml", "*.txt", "Makefile", ".ci/run")
    found = [str(path) for path in texts if LOCAL_PATH.search(path.read_text())]
    assert not found
