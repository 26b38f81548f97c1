"""Every public name can be imported, and the two lists in ``deltasam/__init__.py`` agree."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import deltasam


def public_modules() -> list[str]:
    """Returns every module of deltasam without a leading underscore in its path."""
    found = [module.name for module in pkgutil.walk_packages(deltasam.__path__, "deltasam.")]
    return ["deltasam", *(name for name in found if not any(part.startswith("_") for part in name.split(".")))]


def exists(module: ModuleType, name: str) -> bool:
    """Whether the module has this name; one that needs an optional library, named in the error, counts."""
    try:
        return hasattr(module, name)
    except ModuleNotFoundError as error:
        return f"{name} needs {error.name}: pip install" in str(error)


@pytest.mark.parametrize("name", public_modules())
def test_every_name_of_all_exists(name: str) -> None:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    missing = [public for public in names if not exists(module, public)]
    assert not missing, f"{name}.__all__ contains unknown names: {missing}"
    assert len(set(names)) == len(names), f"{name}.__all__ contains a name twice"


def test_lazy_names_are_listed() -> None:
    """Completion in a shell uses ``dir`` before any name is imported."""
    lazy = [name for name in public_modules() if "__getattr__" in vars(importlib.import_module(name))]
    assert {"deltasam", "deltasam.lab.bench", "deltasam.integrations"} <= set(lazy)
    for name in lazy:
        code = f"import {name} as module; print(*set(module.__all__) - set(dir(module)))"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert not found.stdout.split(), f"dir({name}) lacks {found.stdout}"


def test_type_checkers_see_the_lazy_names() -> None:
    tree = ast.parse(Path(deltasam.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.name) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == {(module, name) for module, names in deltasam._EXPORTS.items() for name in names}


def test_unknown_name_is_a_clear_error() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'DeltaSMA'; it has .*DeltaSAM"):
        _ = deltasam.DeltaSMA


def test_version_is_that_of_pyproject() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{deltasam.__version__}"' in pyproject
