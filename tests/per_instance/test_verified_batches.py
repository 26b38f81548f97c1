"""A batch whose shapes leave the layout open is compared anew, whatever earlier batches proved."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import PerInstanceSAM
from deltasam.objectives import CausalLM
from deltasam.per_instance import instance_gradient_norms
from helpers.instance_reference import relative

Batch = tuple[Tensor, Tensor]


def step_of(model: nn.Module, batch: object, objective: Callable[..., Tensor], method: PerInstanceSAM) -> Tensor:
    model.zero_grad()
    method.backward(model, batch, objective)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error(
    model: nn.Module, batch: object, objective: Callable[..., Tensor], rho: float = 0.1, group: int = 1
) -> float:
    """The relative difference from the loop; a fallback to the loop counts as exact."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine = step_of(model, batch, objective, PerInstanceSAM(rho=0.1, group=group))
    return relative(mine, step_of(model, batch, objective, PerInstanceSAM(rho=0.1, group=group, engine="loop")))


class Positions(nn.Module):
    """A table looked up with ``arange(T)``, which has k N rows if N divides T."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(11, 6), nn.Embedding(32, 6), nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.words(ids) + self.places(torch.arange(ids.shape[1]))))


def texts(n: int, length: int) -> Batch:
    ids = torch.randint(11, (n, length))
    return ids, ids


def test_a_batch_of_one_proves_nothing_about_larger_ones() -> None:
    model = Positions().double()
    assert [error(model, texts(*shape), CausalLM()) for shape in ((1, 5), (4, 8), (2, 8))] == pytest.approx(
        [0, 0, 0], abs=1e-9
    )


def test_a_single_group_proves_nothing_about_several() -> None:
    model = Positions().double()
    for n in (4, 8):
        assert error(model, texts(n, 2 * n), CausalLM(), group=4) < 1e-9


def test_norms_after_a_batch_of_one() -> None:
    model = Positions().double()
    for shape in ((1, 5), (4, 8)):
        batch = texts(*shape)
        mine, exact = (instance_gradient_norms(model, batch, CausalLM(), engine=e) for e in ("auto", "loop"))
        assert relative(mine, exact) < 1e-9


def test_a_batch_of_one_is_compared_once() -> None:
    """Training with one instance per batch makes the comparison in its first step only."""
    model, compared = Positions().double(), []
    backward = torch.autograd.grad

    def grad(outputs: Tensor, inputs: object, *args: object, retain_graph: bool = False, **kwargs: object) -> object:
        compared.append(retain_graph)
        return backward(outputs, inputs, *args, retain_graph=retain_graph, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", grad)
        for _ in range(3):
            PerInstanceSAM().backward(model, texts(1, 5), CausalLM())
    assert compared.count(True) == 2  # the pass itself, and the comparison
