"""Methods are made with keywords, and say so to who gives them the parameters of a model."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from torch import nn

from deltasam.methods import ERM, SAM, DeltaSAM, Method, PerInstanceSAM, Step
from helpers.rows import ROWS, Row


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_parameters_of_a_model(row: Row) -> None:
    kind: Any = type(row.method())
    with pytest.raises(TypeError) as caught:
        kind(nn.Linear(2, 1).parameters(), rho=0.05)
    words = str(caught.value)
    assert words.startswith(f"{kind.__name__} takes hyperparameters, by keyword, and no parameters of a model: ")
    assert "method.backward(model, batch, objective)" in words
    assert "MethodOptimizer(optimizer, method, model)" in words


@pytest.mark.parametrize(("kind", "made"), [(SAM, "SAM(rho=0.05)"), (PerInstanceSAM, "(rho=0.05)"), (ERM, "ERM()")])
def test_what_is_to_be_written_can_be_written(kind: Any, made: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind(0.05)
    assert f"method = {made}" in str(caught.value).replace("PerInstanceSAM(", "(")


@dataclass(frozen=True)
class Positions(SAM):
    """A method of a user's own whose hyperparameter needs no keyword."""

    scale: float = 1.0


class Written(ERM):
    """A method of a user's own with an ``__init__`` that is written out."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        object.__setattr__(self, "names", names)


def test_classes_that_take_positions_are_left_alone() -> None:
    assert Positions(2.0, rho=0.1).scale == 2.0
    assert Written("a", "b").names == ("a", "b")  # type: ignore[attr-defined]


def test_all_else_is_as_it_was() -> None:
    method = DeltaSAM(rho=0.2)
    for other in (copy.copy(method), copy.deepcopy(method), replace(method), method.replace(rho=0.2)):
        assert other == method
    assert pickle.loads(pickle.dumps(method, protocol=2)) == method
    names = [f.name for f in fields(DeltaSAM) if f.init]
    assert list(inspect.signature(DeltaSAM).parameters) == names
    assert not inspect.isfunction(Method.__new__), "autodoc would take its signature for that of every method"
    with pytest.raises(TypeError, match=r"SAM has no hyperparameter lr=0\.1"):
        SAM(lr=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="abstract"):
        Method()  # type: ignore[abstract]


def test_a_step_that_returns_nothing() -> None:
    class Forgets(Method):
        def _step(self, passes: Any) -> Step:  # type: ignore[return]
            passes.accumulate(keep_side_effects=True)

    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"Forgets\._step returned None, .*Step.*make_step\(passes, losses\)"):
        Forgets().backward(model, model.weight.detach(), lambda model, x: model(x).squeeze(-1))
