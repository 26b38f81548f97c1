"""What is said of half-precision weights is measured, and said once."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

from deltasam import precision
from deltasam.methods import ASAM, SAM, FisherSAM, Method


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


def said_by(method: Method, low: nn.Module, x: torch.Tensor) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        method.backward(low, x, objective)
    return [str(one.message) for one in said if "lost in rounding" in str(one.message)]


def test_a_skipped_step_is_not_measured_and_the_next_one_is() -> None:
    low, x = nn.Linear(64, 1).to(torch.bfloat16), torch.randn(4, 64, dtype=torch.bfloat16)
    nn.init.zeros_(low.bias)
    assert said_by(SAM(rho=0.01), low, 0 * x) == []
    (said,) = said_by(SAM(rho=0.01), low, x)
    assert "norm 0.01" in said
    assert said_by(SAM(rho=0.01), low, x) == []


@pytest.mark.parametrize("method", [ASAM(rho=0.5), FisherSAM(rho=0.05, keep=0.02)], ids=lambda m: type(m).__name__)
def test_the_length_of_the_move_is_what_it_is_compared_with(method: Method) -> None:
    """Neither of these goes as far as its rho says."""
    low, x = model().to(torch.bfloat16), torch.randn(4, 64, dtype=torch.bfloat16)
    (said,) = said_by(method, low, x)
    length, arrived = re.search(r"norm ([\d.e-]+) (\d+)% arrived", said).groups()
    exact = model().double()
    exact.load_state_dict({name: value.double() for name, value in low.state_dict().items()})
    seen = []

    def look(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append([p.detach().clone() for p in model.parameters()])
        return model(x).squeeze(-1).square()

    method.replace().backward(exact, x.double(), look)
    moved = torch.cat([(a - b).flatten() for a, b in zip(*seen, strict=True)]).norm()
    assert float(length) == pytest.approx(float(moved), rel=0.03)
    assert 20 < float(arrived) <= 130
