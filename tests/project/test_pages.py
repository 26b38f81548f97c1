"""The pages are complete and correct: methods, packages, layers, commands, presets, links."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest

from deltasam.lab.catalogue import METHODS
from deltasam.lab.cli._commands import COMMANDS
from deltasam.lab.experiments import REGULARISERS, preset_names
from deltasam.lab.report import TABLES
from helpers.data import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted([REPOSITORY / "README.md", *DOCS.rglob("*.md")])
LAZY = ("deltasam.integrations", "deltasam.lab.bench")
WRAPPERS = list(REGULARISERS)


def name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("known", [*METHODS, *WRAPPERS])
def test_the_methods_page_lists_it(known: str) -> None:
    assert re.search(rf"{{class}}`~deltasam\.\w+\.{known}`", (DOCS / "methods.md").read_text())


def test_the_api_has_every_public_module() -> None:
    """Every package with ``__all__``, and every module of the rooms whose packages export nothing."""
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    source = REPOSITORY / "src" / "deltasam"
    shown = {path.parent for path in source.rglob("__init__.py") if "__all__ = [" in path.read_text()} - {source}
    modules = (path for room in ("step", "parallel", "speed") for path in (source / room).rglob("[!_]*.py"))
    shown |= {path.with_suffix("") for path in modules}
    dotted = [".".join(path.relative_to(source.parent).parts) for path in shown]
    assert {"deltasam.lab.sweeps", "deltasam.step.passes", "deltasam.speed.capture"} <= set(dotted)
    assert not [each for each in dotted if f"automodule:: {each}\n" not in pages]


def test_the_api_has_every_lazy_name() -> None:
    """``automodule`` skips such names silently, because they are not attributes of the package."""
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    names = [f"{package}.{each}" for package in LAZY for each in importlib.import_module(package).__all__]
    assert not [each for each in names if f":: {each}\n" not in pages]


@pytest.mark.parametrize("contract", ["rooms", "lab"])
def test_every_room_has_a_description_and_is_in_contributing(contract: str) -> None:
    rooms = runpy.run_path(str(DOCS / "rooms.py"))
    inside = "" if contract == "rooms" else contract
    table = rooms["table"](contract, inside)
    names = [room for row in rooms["layers"](contract) for room in row]
    assert len(names) > 5
    assert all(len(line.split("|")[2].strip()) > 10 for line in table.splitlines()[2:])
    guide = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert not [name for name in names if f"`{inside}{'/' * bool(inside)}{name}" not in guide]


def commands(page: Path) -> list[list[str]]:
    """Returns the arguments of deltasam in lines of shell blocks and in inline code."""
    text = page.read_text()
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S)).replace("\\\n", " ").splitlines()
    called = [line.partition("#")[0] for line in lines] + re.findall(r"`([^`\n]+)`", text)
    return [shlex.split(line)[1:] for line in called if re.match(r"deltasam [a-z]", line) and "..." not in line]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_commands_on_a_page_exist(page: Path) -> None:
    for words in commands(page):
        known = words[0] if words[0] in COMMANDS else " ".join(words[:2])
        assert known in COMMANDS or words[0] in {first.split()[0] for first in COMMANDS}, words
        if words[0] == "table" and len(words) > 1:
            assert words[1] in {*TABLES, "results"}, words
        if words[0] == "sweep" and len(words) > 1 and not words[1].startswith("my"):
            packaged = REPOSITORY / "configs" / "sweeps" / f"{Path(words[1]).stem}.yaml"
            assert packaged.is_file() or (REPOSITORY / words[1]).is_file(), words
        if "--preset" in words:
            assert words[words.index("--preset") + 1] in preset_names(), words


@pytest.mark.parametrize("page", [REPOSITORY / "README.md", REPOSITORY / "examples" / "README.md"], ids=name)
def test_links_work(page: Path) -> None:
    """Sphinx checks the links of the other pages."""
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text())
    assert links
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("folder", ["results", "benchmarks"])
def test_the_readme_of_a_folder_lists_everything_in_it(folder: str) -> None:
    listed = re.findall(r"`([\w.*-]+)`", (REPOSITORY / folder / "README.md").read_text())
    paths = [path for path in (REPOSITORY / folder).iterdir() if path.is_dir() or path.suffix == ".py"]
    names = [path.name for path in paths if not path.name.startswith(("_", "."))]
    assert not [each for each in names if not any(fnmatch(each, pattern) for pattern in listed)]
