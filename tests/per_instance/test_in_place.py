"""Models that change tensors in place: the output of a layer, or (under autocast) its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
def test_under_autocast_a_layer_sees_the_current_value_of_its_input(group: int) -> None:
    model, x = Residual(), torch.randn(4, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = losses(model, x).detach()
        step = PerInstanceSAM(rho=0.05, group=group, engine="low-rank").backward(model, x, losses)
        found = grads(model)
        model.zero_grad()
        PerInstanceSAM(rho=0.05, group=group, engine="loop").backward(model, x, losses)
    assert torch.allclose(step.losses, wanted, rtol=1e-2)
    assert relative_error(found, grads(model)) < 0.05


class Changed(nn.Module):
    """The output of a layer is changed in place: ``nn.ReLU(inplace=True)``, ``out += residual``."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any], layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(6, 1)
        self.offset = nn.Parameter(torch.randn(6))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.change(h, x)
        return self.out((h + self.offset).tanh()).flatten(1).mean(1)


def one_row(h: Tensor, x: Tensor) -> None:
    h[0] = 0.0


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "relu": lambda h, x: F.relu(h, inplace=True),
    "residual": lambda h, x: h.add_(x),
    "scaled": lambda h, x: h.mul_(2.0),
    "masked": lambda h, x: h.masked_fill_(x > 1, 0.0),
    "one row": one_row,
    "a view": lambda h, x: h[..., :3].sigmoid_(),
}
LAYERS = {"linear": lambda: nn.Linear(6, 6), "without a bias": lambda: nn.Linear(6, 6, bias=False)}
LAYERS["norm"] = lambda: nn.LayerNorm(6)


@pytest.mark.parametrize("shape", [(5, 4, 6), (5, 6), (5, 2, 3, 6), (1, 4, 6), (4, 4, 6)], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("group", [1, 2])
def test_the_output_of_a_layer_may_be_changed_in_place(
    change: str, layer: str, shape: tuple[int, ...], group: int
) -> None:
    model, x = Changed(CHANGES[change], LAYERS[layer]()).double(), torch.randn(*shape, dtype=torch.float64)
    found = []
    for engine in ("low-rank", "loop"):
        model.zero_grad()
        step = PerInstanceSAM(rho=0.3, group=group, engine=engine).backward(model, x, losses_in_float64)
        found.append((grads(model), step))
    assert relative_error(found[0][0], found[1][0]) < 1e-9
    assert torch.allclose(found[0][1].perturbed_losses, found[1][1].perturbed_losses, rtol=1e-9)
    assert torch.allclose(found[0][1].grad_norm, found[1][1].grad_norm, rtol=1e-9)


def losses_in_float64(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1) ** 2


def test_outputs_of_convolutions_and_lookups_may_be_changed_in_place() -> None:
    for layer, x in (
        (nn.Conv1d(2, 6, 2), torch.randn(5, 2, 3)),
        (nn.Conv1d(2, 6, 3), torch.randn(5, 2, 3)),
        (nn.Conv1d(2, 1, 2), torch.randn(5, 2, 7)),
        (nn.Embedding(7, 6), torch.randint(7, (5, 3))),
    ):
        found = []
        model = nn.Sequential(layer, nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(1), nn.Flatten(0)).double()
        inputs = x.double() if x.is_floating_point() else x
        model(inputs)
        for engine in ("low-rank", "loop"):
            model.zero_grad()
            PerInstanceSAM(rho=0.3, engine=engine).backward(model, inputs, losses_in_float64)
            found.append(grads(model))
        assert relative_error(*found) < 1e-9
