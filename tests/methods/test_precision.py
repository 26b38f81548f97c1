"""What is said of half-precision weights is measured, and said once."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

from deltasam import precision
from deltasam.methods import SAM


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def objective(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().squeeze(-1).square()


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_said", set())


def test_how_much_of_the_perturbation_arrives_is_said_once() -> None:
    low, x = model().to(torch.bfloat16), torch.randn(4, 64, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="lost in rounding") as said:
        SAM(rho=0.001).backward(low, x, objective)
    arrived, moved = re.search(r"(\d+)% arrived and ([\d.]+)% of the", str(said[0].message)).groups()
    # the same by hand
    w = [p.detach().clone() for p in low.parameters()]
    g = torch.autograd.grad(objective(low, x).mean(), list(low.parameters()))
    norm = torch.cat([v.float().flatten() for v in g]).norm()
    after = [a + (0.001 / norm * v.float()).to(a.dtype) for a, v in zip(w, g, strict=True)]
    difference = torch.cat([(a.float() - b.float()).flatten() for a, b in zip(after, w, strict=True)])
    assert abs(float(arrived) / 100 - float(difference.norm()) / 0.001) < 0.05
    assert abs(float(moved) / 100 - float((difference != 0).float().mean())) < 0.02
    assert float(moved) < 50
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SAM(rho=0.001).backward(low, x, objective)


def test_nothing_is_said_of_float32_weights_under_autocast() -> None:
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        SAM().backward(model(), torch.randn(4, 64), objective)
