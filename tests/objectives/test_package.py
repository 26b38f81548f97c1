"""The objectives as a package: names, examples, frozen configurations."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import pickle
import pkgutil
import sys
from pathlib import Path

import pytest

from deltasam import objectives
from deltasam.objectives import CausalLM, Classification, Contrastive, Regression, Seq2Seq, Tokens

CONCRETE = [CausalLM, Classification, Contrastive, Regression, Seq2Seq, Tokens]
MODULES = [name for _, name, _ in pkgutil.iter_modules(objectives.__path__)]


def test_every_public_name_exists_once():
    assert len(set(objectives.__all__)) == len(objectives.__all__)
    assert all(hasattr(objectives, name) for name in objectives.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(f"deltasam.objectives.{name}")).failed == 0


def test_every_objective_has_an_example():
    assert all(">>>" in (objective.__doc__ or "") for objective in CONCRETE)


@pytest.mark.parametrize("name", MODULES)
def test_only_torch_is_imported(name):
    source = Path(importlib.import_module(f"deltasam.objectives.{name}").__file__).read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    allowed = {"torch", "deltasam", *sys.stdlib_module_names}
    assert {module.split(".")[0] for module in found} <= allowed


@pytest.mark.parametrize("objective", CONCRETE)
def test_an_objective_is_its_configuration(objective):
    made = objective()
    assert eval(repr(made), vars(objectives)) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(made) == hash(objective())
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.predict = None
    with pytest.raises(TypeError):
        objective("labels")


def test_objectives_without_state():
    assert Classification().state_dict() == {}
    Classification().load_state_dict({})
    with pytest.raises(ValueError, match=r"Classification has no state.*teacher"):
        Classification().load_state_dict({"teacher": 1})
