"""A step that leaves its perturbation out takes the plain gradient, of all instances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import ASAM, ESAM, GSAM, SAM, DeltaSAM, FisherSAM, Method


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 1)
        self.unused = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).squeeze(-1)


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) ** 2


METHODS = [SAM, ASAM, GSAM, DeltaSAM, FisherSAM, ESAM, lambda **o: ESAM(gamma=0.3, **o)]


@pytest.mark.parametrize("make", METHODS, ids=["sam", "asam", "gsam", "delta-sam", "fisher-sam", "esam", "esam-0.3"])
def test_the_plain_gradient(make: type[Method]) -> None:
    model, x = Unused().double(), torch.randn(8, 3, dtype=torch.float64)
    plain = torch.autograd.grad(objective(model, x).mean(), model.used.weight)[0]
    step = make(params=lambda name, p: "unused" in name).backward(model, x, objective)
    assert "took the plain gradient" in str(step.why_skipped)
    assert step.perturbed_losses is not None
    torch.testing.assert_close(step.perturbed_losses, step.losses)
    torch.testing.assert_close(model.used.weight.grad, plain, rtol=1e-12, atol=1e-12)


def test_esam_selects_where_it_perturbs() -> None:
    model, x = Unused().double(), torch.randn(8, 3, dtype=torch.float64)
    plain = torch.autograd.grad(objective(model, x).mean(), model.used.weight)[0]
    step = ESAM(rho=1e-9, gamma=0.3, beta=1.0).backward(model, x, objective)
    assert step.why_skipped is None
    assert not torch.allclose(model.used.weight.grad, plain, rtol=1e-3)
