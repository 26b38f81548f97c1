"""A method is frozen, and says how to have another one."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from deltasam.methods import ERM, SAM, DeltaSAM
from deltasam.methods._frozen import _telling
from helpers.rows import ROWS, Row


@dataclass(frozen=True, kw_only=True)
class Own(SAM):
    """A method of a user's own."""

    scale: float = 1.0


class Plain(Own):
    """A class that is no dataclass itself, with an attribute of its own."""


@pytest.mark.parametrize("kind", [SAM, DeltaSAM, Own, Plain])
def test_an_assignment_says_the_way_out(kind: type[SAM]) -> None:
    method = kind(rho=0.2)
    with pytest.raises(FrozenInstanceError) as caught:
        method.rho = 0.1  # type: ignore[misc]
    words = str(caught.value)
    assert words.startswith(f"{kind.__name__} is frozen: rho=0.1 cannot be assigned")
    assert "dataclasses.replace(method, rho=0.1)" in words
    assert method.rho == 0.2
    assert replace(method, rho=0.1).rho == method.replace(rho=0.1).rho == 0.1


def test_what_is_no_hyperparameter() -> None:
    with pytest.raises(AttributeError, match="ERM is frozen and has no hyperparameter 'rho'; it has params, "):
        ERM().rho = 0.1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="cannot delete"):
        del SAM().rho
    loose = Plain()
    loose.note = "as Python has it"  # type: ignore[attr-defined]
    assert loose.note == "as Python has it"  # type: ignore[attr-defined]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_method_is_copied_and_pickled_as_before(row: Row) -> None:
    method = row.method()
    for other in (copy.copy(method), copy.deepcopy(method), replace(method)):
        assert other == method
    if not callable(method.params):
        assert pickle.loads(pickle.dumps(method)) == method
    with pytest.raises(FrozenInstanceError, match=r"dataclasses\.replace"):
        method.randomness = "independent"  # type: ignore[misc]


def test_a_class_is_told_once() -> None:
    SAM()
    before, size = SAM.__setattr__, len(_telling)
    SAM(), SAM()
    assert SAM.__setattr__ is before
    assert len(_telling) == size
