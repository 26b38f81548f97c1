"""Optimizers that step in hooks during backward: allowed if the weights are at w and the gradient is final."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deltasam import ASAM, ERM, ESAM, GSAM, SAM, DeltaSAM, FreeLB, LookSAM, Method, PerInstanceSAM, SubsetSAM


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1) ** 2


def stepping(model: nn.Module) -> None:
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def hook(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(hook)


MOVING = [SAM(), DeltaSAM(), ASAM(), GSAM(), LookSAM(), ESAM(), SubsetSAM(), PerInstanceSAM(engine="loop")]
MOVING += [FreeLB(embeddings="0"), SAM(params=lambda name, p: name == "1.bias")]


@pytest.mark.parametrize("method", MOVING, ids=lambda m: type(m).__name__)
def test_a_step_that_would_be_lost_is_refused(method: Method) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), torch.randn(5, 3)
    stepping(model)
    with pytest.raises(RuntimeError, match=r"optimizer steps in a hook of '\d.*after method.backward"):
        method.backward(model, x, squares)


@pytest.mark.parametrize("method", [ERM(), SAM(rho=0.0), PerInstanceSAM(engine="low-rank")], ids=repr)
def test_at_w_it_is_the_step_after_backward(method: Method) -> None:
    torch.manual_seed(0)
    model, other, x = nn.Linear(3, 1), nn.Linear(3, 1), torch.randn(5, 3)
    other.load_state_dict(model.state_dict())
    stepping(model)
    method.backward(model, x, squares)
    method.backward(other, x, squares)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_hooks_that_only_look_are_fine() -> None:
    model, x, seen = nn.Linear(3, 1), torch.randn(5, 3), []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    SAM().backward(model, x, squares)
    assert len(seen) == 1
