"""A comparison for one objective proves nothing for another, whose instances may mix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import PerInstanceSAM
from deltasam.objectives.regularisers import EmbeddingNoise
from deltasam.per_instance import InstancesMixedError, instance_gradient_norms
from deltasam.per_instance.interception.memory import memory_of
from deltasam.per_instance.verification.objective_kind import kind_of


def alone(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def negatives(model: nn.Module, x: Tensor, temperature: float = 1.0) -> Tensor:
    """Every instance against all others of the batch."""
    y = model(x)
    return -torch.log_softmax(y @ y.T / temperature, 1).diagonal()


class Negatives:
    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return negatives(model, x)

    def bound(self, model: nn.Module, x: Tensor) -> Tensor:
        return negatives(model, x)


MIXING: dict[str, Callable[..., Tensor]] = {
    "function": negatives,
    "partial": partial(negatives, temperature=0.5),
    "object": Negatives(),
    "bound method": Negatives().bound,
    "lambda": lambda model, x: 2 * negatives(model, x),
}


class Switched:
    def __init__(self, mixing: bool) -> None:
        self.mixing = mixing

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return negatives(model, x) if self.mixing else alone(model, x)

    def bound(self, model: nn.Module, x: Tensor) -> Tensor:
        return self(model, x)


def calls(model: nn.Module, x: Tensor, losses: Callable[..., Tensor]) -> Tensor:
    return losses(model, x)


def named(model: nn.Module, x: Tensor, kind: str) -> Tensor:
    return negatives(model, x) if kind == "negatives" else alone(model, x)


def of_switch(mixing: bool) -> Callable[..., Tensor]:
    return lambda model, x: negatives(model, x) if mixing else alone(model, x)


SETTINGS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "object": (Switched(False), Switched(True)),
    "bound method": (Switched(False).bound, Switched(True).bound),
    "function of a partial": (partial(calls, losses=alone), partial(calls, losses=negatives)),
    "string in a partial": (partial(named, kind="alone"), partial(named, kind="negatives")),
    "partial of an object": (partial(Switched(False)), partial(Switched(True))),
    "closure": (of_switch(False), of_switch(True)),
}


def objective_of(losses: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda model, x: 2 * losses(model, x)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("mixing", MIXING.values(), ids=MIXING.keys())
def test_instances_that_mix_are_found_after_an_objective_whose_instances_do_not(mixing: Any) -> None:
    model, x = network(), torch.randn(4, 3).double()
    PerInstanceSAM().backward(model, x, alone)
    with pytest.raises(InstancesMixedError):
        PerInstanceSAM().backward(model, x, mixing)
    with pytest.raises(InstancesMixedError):
        instance_gradient_norms(model, x, mixing)


@pytest.mark.parametrize(("apart", "mixing"), SETTINGS.values(), ids=SETTINGS.keys())
def test_settings_of_one_objective_are_distinguished(apart: Any, mixing: Any) -> None:
    model, x = network(), torch.randn(4, 3).double()
    PerInstanceSAM().backward(model, x, apart)
    with pytest.raises(InstancesMixedError):
        PerInstanceSAM().backward(model, x, mixing)


def test_numbers_that_change_from_step_to_step_cost_no_comparison() -> None:
    model, x = network(), torch.randn(4, 3).double()
    objective: Any = Switched(False)
    for k in range(4):
        objective.steps, objective.share = k, 0.1 * k
        PerInstanceSAM().backward(model, x, objective)
    assert len(memory_of(model).verified) == 1


def test_an_objective_that_is_made_anew_in_every_step_is_compared_once() -> None:
    model, x = network(), torch.randn(4, 3).double()
    for k in range(4):
        PerInstanceSAM().backward(model, x, lambda model, x, k=k: alone(model, x) * (k + 1))
        PerInstanceSAM().backward(model, x, partial(alone))
    assert len(memory_of(model).verified) == 2


def test_objectives_of_one_factory_are_distinguished_by_the_function_they_call() -> None:
    model, x = network(), torch.randn(4, 3).double()
    for _ in range(2):
        PerInstanceSAM().backward(model, x, objective_of(alone))
    assert len(memory_of(model).verified) == 1
    with pytest.raises(InstancesMixedError):
        PerInstanceSAM().backward(model, x, objective_of(negatives))


def test_a_function_that_refers_to_itself_or_to_an_empty_cell() -> None:
    def again(model: nn.Module, x: Tensor) -> Tensor:
        return alone(model, x) if len(x) else again(model, later)

    before = kind_of(again)
    later = torch.ones(1, 3)
    assert kind_of(again) == before
    assert len(later)


def test_the_objective_inside_a_regulariser_counts() -> None:
    kinds = [EmbeddingNoise(each) for each in (alone, negatives)]
    assert kind_of(kinds[0]) != kind_of(kinds[1])
    assert kind_of(kinds[0]) == kind_of(EmbeddingNoise(alone))
