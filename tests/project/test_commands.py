"""The package accepts all commands and sweep files that the documentation shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import tyro
import yaml

from deltasam.lab.cli._arguments import arranged
from deltasam.lab.cli._commands import COMMANDS
from deltasam.lab.cli._main import find_command
from deltasam.lab.sweeps import Sweep, final_runs, tuning_runs
from helpers.data import REPOSITORY

DOCS = [path for path in (REPOSITORY / "docs").rglob("*.md") if "_build" not in path.parts]
PAGES = sorted([*DOCS, *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md"))])


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    lines = [line.strip() for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    called = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("deltasam ")]
    return [[word for word in words if word != "..."] for words in called]


@pytest.mark.parametrize(
    ("page", "words"),
    [(page, words) for page in PAGES for words in commands(page) if "--help" not in words],
    ids=lambda value: value.stem if isinstance(value, Path) else " ".join(value),
)
def test_a_command_of_a_page_is_understood(page: Path, words: list[str]) -> None:
    name = find_command(words)
    assert name is not None, f"{page.name}: deltasam {' '.join(words)}"
    kind = COMMANDS[name].load()
    rest = arranged(kind, words[len(name.split()) :])
    tyro.cli(kind, args=rest, config=(tyro.conf.FlagCreatePairsOff,))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=lambda page: page.stem)
def test_a_sweep_file_of_a_page_describes_runs(page: Path) -> None:
    for block in blocks(page, "yaml"):
        sections = yaml.safe_load(block)
        if "methods" in sections:
            sweep = Sweep.from_plain(sections, page.stem)
            assert [*tuning_runs(sweep), *final_runs(sweep, {})]
