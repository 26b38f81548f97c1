"""A batch of one instance: what other batches sum over the instances is a view there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import MicroBatches, PerInstanceSAM
from deltasam.objectives import Regression
from deltasam.step.checks import sharing
from helpers.architectures import ARCHITECTURES, Architecture
from helpers.instance_reference import gradient_errors, loop
from helpers.problems import grads

SINGLE = pytest.mark.filterwarnings("ignore")  # of models that are looped over
N, RHO = 3, 0.1


class Patches(nn.Module):
    """A class token in front of the patches, and a table of positions, as in ViT and BLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 3, 4))
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), self.embed(x)], 1) + self.positions
        return self.head(tokens.tanh().mean(1)).squeeze(-1)


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = Patches().double(), (torch.randn(N, 2, 4).double(), torch.randn(N).double())
    exact = loop(model, lambda: Regression()(model, batch), RHO)
    model.zero_grad()
    return model, batch, exact.gradient


def singles(batch: tuple[Tensor, Tensor]) -> list[Any]:
    return [tuple(each[k : k + 1] for each in batch) for k in range(N)]


def test_accumulated_gradients() -> None:
    model, batch, exact = problem()
    for one in singles(batch):
        PerInstanceSAM(rho=RHO).backward(model, one, Regression(), scale=1 / N)
    assert gradient_errors(grads(model), exact) < 1e-9


@pytest.mark.parametrize("at_once", [None, 1])
def test_micro_batches(at_once: int | None) -> None:
    model, batch, exact = problem()
    whole = MicroBatches(singles(batch)) if at_once is None else batch
    PerInstanceSAM(rho=RHO, at_once=at_once).backward(model, whole, Regression())
    assert gradient_errors(grads(model), exact) < 1e-9


def test_clipped_gradients() -> None:
    """Clipping multiplies in place, gradients that share memory more than once."""
    model, batch, _ = problem()
    PerInstanceSAM(rho=RHO).backward(model, singles(batch)[0], Regression())
    before = grads(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    torch.testing.assert_close(grads(model), {name: g * 1e-2 / norm for name, g in before.items()}, rtol=1e-3, atol=0)


@SINGLE
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_no_two_gradients_share_memory(architecture: Architecture) -> None:
    torch.manual_seed(0)
    model, batch = architecture.build(), architecture.batch(1)
    PerInstanceSAM(rho=RHO).backward(model, batch, architecture.losses)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert sharing(found, found) is None
