"""Every file is in a room, no files import each other in a circle, no file uses the private names of another room."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from helpers.data import REPOSITORY

SOURCE = REPOSITORY / "src" / "deltasam"
TOP_LEVEL = {"__init__.py", "__main__.py", "_torch.py", "py.typed"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports(name: str) -> dict[str, set[str]]:
    """Returns the modules that a file imports, also inside functions, and the names that it takes from each."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, set())
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in MODULES:
                    found.setdefault(inner, set())
                else:
                    found.setdefault(node.module, set()).add(alias.name)
    return {module: names for module, names in found.items() if module in MODULES and module != name}


def test_no_other_module_is_at_the_top_level() -> None:
    assert {path.name for path in SOURCE.iterdir() if path.is_file()} <= TOP_LEVEL


def test_files_do_not_import_each_other_in_a_circle() -> None:
    """``deltasam`` itself is excluded: it imports public names lazily."""
    graph = {name: set(imports(name)) - {"deltasam"} for name in MODULES if name != "deltasam"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


@pytest.mark.parametrize("name", MODULES)
def test_a_file_uses_no_private_names_of_another_package(name: str) -> None:
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    wrong = []
    for module, names in imports(name).items():
        home = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
        if module == "deltasam._torch" or f"{package}.".startswith(f"{home}.") or module.startswith(f"{package}."):
            continue  # a package and its subpackages are one room
        if any(map(is_private, module.split("."))) or any(map(is_private, names)):
            wrong.append(f"{module}: {', '.join(sorted(names))}")
    assert not wrong


@pytest.mark.parametrize("name", MODULES)
def test_every_file_has_a_docstring(name: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[name].read_text()))
