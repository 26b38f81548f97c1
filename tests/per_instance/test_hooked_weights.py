"""Weights that hooks compute before every forward: pruning, and the older weight and spectral norms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from deltasam import DeltaSAM, OwnGradient, PerInstanceSAM
from helpers.problems import grads, relative_error


def spectral(layer: nn.Linear) -> None:
    nn.utils.spectral_norm(layer).eval()


MADE: dict[str, Callable[[nn.Linear], object]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "pruned bias": lambda layer: prune.random_unstructured(layer, "bias", 0.5),
    "weight norm": nn.utils.weight_norm,
    "spectral norm": spectral,
}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).squeeze(-1) - 1) ** 2


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4)], ids=str)
def test_results_equal_the_loop_and_no_proxy_is_left_behind(kind: str, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    MADE[kind](model[0])
    x, found = torch.randn(*shape, dtype=torch.float64), []

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x).flatten(1).mean(1) if x.ndim == 3 else squares(model, x)

    for engine in ("low-rank", "loop"):
        model.zero_grad()
        PerInstanceSAM(rho=0.3, engine=engine).backward(model, x, losses)
        found.append(grads(model))
        assert type(model[0].weight) in (Tensor, nn.Parameter)
        assert type(model[0].bias) in (Tensor, nn.Parameter)
    assert relative_error(*found) < 1e-9
    DeltaSAM(weighting=OwnGradient()).backward(model, x, losses)
