"""The examples in the docstrings of tasks and experiments hold."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import deltasam.lab.experiments
import deltasam.lab.tasks

MODULES = [
    module.name
    for package in (deltasam.lab.tasks, deltasam.lab.experiments)
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
]


@pytest.mark.parametrize("name", ["deltasam.lab.tasks", "deltasam.lab.experiments", *MODULES])
def test_docstring_examples_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize("name", ["deltasam.lab.tasks", "deltasam.lab.experiments"])
def test_public_names_exist(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    assert all(hasattr(module, public) for public in module.__all__)
