"""Models that change the input of a layer in place before another layer reads it, which autocast's copies allow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deltasam import PerInstanceSAM
from helpers.problems import grads, relative_error


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first, self.second, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x += self.first(x)
        x = x + self.second(x)
        return self.out(x.relu()).mean((1, 2))


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - 1) ** 2


@pytest.mark.parametrize("group", [1, 2, 3])
def test_under_autocast_a_layer_sees_what_its_input_is_now(group: int) -> None:
    model, x = Residual(), torch.randn(4, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = losses(model, x).detach()
        step = PerInstanceSAM(rho=0.05, group=group, engine="low-rank").backward(model, x, losses)
        found = grads(model)
        model.zero_grad()
        PerInstanceSAM(rho=0.05, group=group, engine="loop").backward(model, x, losses)
    assert torch.allclose(step.losses, wanted, rtol=1e-2)
    assert relative_error(found, grads(model)) < 0.05
