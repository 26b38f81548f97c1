"""Import paths from the documentation of 0.1 still work, with a warning."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import deltasam


@pytest.mark.parametrize("old", sorted(deltasam._MOVED))
def test_an_old_path_is_the_new_module(old: str) -> None:
    new = importlib.import_module(f"deltasam.{deltasam._MOVED[old]}")
    spec = new.__spec__
    sys.modules.pop(f"deltasam.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"deltasam\.{old} is now deltasam\.{deltasam._MOVED[old]}"):
        moved = importlib.import_module(f"deltasam.{old}")
    assert moved is new
    assert new.__spec__ is spec


def test_from_imports_and_sweeps() -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from deltasam.capture import Captured; from deltasam.speed.capture import Captured as new\n"
        "from deltasam.experiments.sweeps import Sweep; from deltasam.lab.sweeps import Sweep as new_sweep\n"
        "assert Captured is new and Sweep is new_sweep"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_module_is_an_ordinary_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"deltasam\.captures"):
        importlib.import_module("deltasam.captures")
