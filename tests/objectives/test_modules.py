"""Objectives that are also modules: called as objectives, with the state of modules, in either order of bases."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import SAM, Classification, Objective
from deltasam.objectives.regularisers import RDrop
from deltasam.speed.capture._key import objective_key


class Outputs:
    """Outputs, losses, divergence and a weight, for either order of bases."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch).squeeze(-1)
        return outputs

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.factor * outputs.square()

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        return (first - second).square()


class ObjectiveFirst(Outputs, Objective, nn.Module):
    """The objective first."""


class ModuleFirst(Outputs, nn.Module, Objective):
    """The module first."""


class SmoothedFirst(Classification, nn.Module):
    """A frozen dataclass, whose ``__init__`` does not call the module's."""

    def __init__(self) -> None:
        super().__init__(label_smoothing=0.1)
        self.factor = nn.Parameter(torch.tensor(2.0))


class SmoothedLast(nn.Module, Classification):
    """The module first, so ``__init__`` is the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))


KINDS = [ObjectiveFirst, ModuleFirst, SmoothedFirst, SmoothedLast]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_kept(kind: Any) -> None:
    objective, other = kind(), kind()
    assert [name for name, _ in objective.named_parameters()] == ["factor"]
    with torch.no_grad():
        objective.factor.fill_(5.0)
    other.load_state_dict(objective.state_dict())
    assert other.factor.item() == 5
    for again in (copy.deepcopy(objective), pickle.loads(pickle.dumps(objective))):
        assert again.factor.item() == 5


@pytest.mark.parametrize("kind", [ObjectiveFirst, ModuleFirst])
def test_the_call_returns_losses_not_outputs(kind: Any) -> None:
    model, x, objective = nn.Linear(2, 1), torch.randn(3, 2), kind()
    assert torch.equal(objective(model, x), 2 * model(x).squeeze(-1).square())
    SAM(rho=0.1).backward(model, x, objective)
    assert objective.factor.grad is not None


@pytest.mark.parametrize("kind", [SmoothedFirst, SmoothedLast])
def test_the_call_of_a_dataclass(kind: Any) -> None:
    model, batch, objective = nn.Linear(2, 3), (torch.randn(4, 2), torch.randint(3, (4,))), kind()
    known = Classification(label_smoothing=0.1 if kind is SmoothedFirst else 0.0)
    assert torch.equal(objective(model, batch), known(model, batch))


class WeighedFirst(RDrop, nn.Module):
    """A regulariser with a weight."""

    def __init__(self, objective: Any) -> None:
        RDrop.__init__(self, objective)
        self.factor = nn.Parameter(torch.tensor(2.0))


class WeighedLast(nn.Module, RDrop):
    """The module first."""

    def __init__(self, objective: Any) -> None:
        RDrop.__init__(self, objective)
        self.factor = nn.Parameter(torch.tensor(2.0))


REGULARISERS = [WeighedFirst, WeighedLast]


@pytest.mark.parametrize("kind", REGULARISERS)
def test_regularisers_save_their_weights_and_those_of_the_wrapped_objective(kind: Any) -> None:
    regulariser, other, plain = kind(SmoothedFirst()), kind(SmoothedFirst()), kind(Classification())
    with torch.no_grad():
        regulariser.factor.fill_(5.0)
        regulariser.objective.factor.fill_(7.0)
    other.load_state_dict(regulariser.state_dict())
    assert (other.factor.item(), other.objective.factor.item()) == (5, 7)
    plain.load_state_dict({})  # a checkpoint without weights
    assert plain.factor.item() == 2
    model, batch = nn.Linear(2, 3), (torch.randn(4, 2), torch.randint(3, (4,)))
    assert plain(model, batch).shape == (4,)


@pytest.mark.parametrize("make", [*KINDS, *(lambda kind=kind: kind(Classification()) for kind in REGULARISERS)])
def test_as_parts_of_a_module_each_has_its_weights(make: Any) -> None:
    """Torch would skip the weights of the second of two equal modules."""
    both = nn.ModuleList([make(), make()])
    assert [name for name, _ in both.named_parameters()] == ["0.factor", "1.factor"]
    with torch.no_grad():
        both[1].factor.fill_(5.0)
    saved = both.state_dict()
    assert {name: value.item() for name, value in saved.items()} == {"0.factor": 2, "1.factor": 5}
    again = nn.ModuleList([make(), make()])
    again.load_state_dict(saved)
    assert again[1].factor.item() == 5


def test_methods_that_a_class_defines_are_kept() -> None:
    class Own(ObjectiveFirst):
        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            return torch.ones(3)

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            made = super().__new__(cls)
            made.mark = "mine"
            return made

        def __eq__(self, other: object) -> bool:
            return type(self) is type(other)

        __hash__ = ObjectiveFirst.__hash__

        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {"mine": 1}

    class Inherits(Own):
        """Changes nothing."""

    for kind in (Own, Inherits):
        assert kind()(nn.Linear(2, 1), torch.randn(3, 2)).tolist() == [1, 1, 1]
        assert kind().state_dict() == {"mine": 1}
        assert kind().mark == "mine"
        assert kind() == kind()


def test_forward_is_still_abstract() -> None:
    class Without(nn.Module, Objective):
        losses, divergence = Outputs.losses, Outputs.divergence

    with pytest.raises(TypeError, match=r"abstract.*forward"):
        Without()


def test_two_objectives_with_weights_have_different_capture_keys() -> None:
    assert objective_key(SmoothedFirst()) != objective_key(SmoothedFirst())
