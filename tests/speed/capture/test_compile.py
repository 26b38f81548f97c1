"""A compiled model with every method: the same gradients, and no recompilation after the first step."""

from __future__ import annotations

import pytest
import torch

from deltasam.methods import ASAM, ERM, GSAM, SAM, DeltaSAM, LookSAM, Method
from deltasam.objectives import RDrop, Regression
from helpers.problems import TRANSFORMER_NO_DROPOUT, cross_entropy, grads, relative_error

METHODS = [ERM(), SAM(), DeltaSAM(), ASAM(), GSAM(), LookSAM(k=2)]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_no_recompilation_and_the_same_gradients(method: Method) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    reference, _, _ = TRANSFORMER_NO_DROPOUT.make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compilations = []
    for _ in range(4):
        model.zero_grad()
        method.backward(compiled, batch, objective)
        compilations.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    method.state.clear()
    for _ in range(4):
        reference.zero_grad()
        method.backward(reference, batch, cross_entropy)
    assert compilations[-1] == compilations[1], compilations  # LookSAM's second step is of another kind
    assert compilations[-1] <= 2  # with and without a graph
    assert relative_error(grads(model), grads(reference)) < 1e-6


def test_a_regulariser_over_a_compiled_model() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    batch = (torch.randn(5, 3).double(), torch.randn(5).double())
    objective = RDrop(Regression())
    SAM().backward(torch.compile(model, backend="aot_eager"), batch, objective)
    compiled = grads(model)
    model.zero_grad()
    SAM().backward(model, batch, objective)
    assert relative_error(compiled, grads(model)) < 1e-10
