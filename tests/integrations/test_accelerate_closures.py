"""``MethodOptimizer`` prepared by Accelerate, which drops all closures except the last when it accumulates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.integrations import MethodOptimizer
from deltasam.methods import SAM

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (extra hf)")

BATCHES = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_accumulation() -> Iterator[None]:
    """All accelerators of a process share one state; the newest sets it."""
    yield
    accelerate.Accelerator()


def parts(steps: int) -> tuple[Any, nn.Module, MethodOptimizer]:
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=steps)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return accelerator, model, MethodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), SAM(), model)


def train(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
    for batch in BATCHES:

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        with accelerator.accumulate(model):
            optimizer.step(closure)


@pytest.mark.parametrize("scheduled", [False, True], ids=["bare", "with a scheduler"])
def test_accumulation_is_refused(scheduled: bool) -> None:
    accelerator, model, optimizer = parts(2)
    if scheduled:  # it wraps the optimizer's step
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2\).*method\.backward.*scale=1 / 2"):
        train(accelerator, model, accelerator.prepare(optimizer))
    assert torch.equal(model.weight, before)


def test_without_accumulation_every_closure_is_called() -> None:
    ends = []
    for prepared in (True, False):
        accelerator, model, optimizer = parts(1)
        train(accelerator, model, accelerator.prepare(optimizer) if prepared else optimizer)
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)


def test_an_unprepared_optimizer_gets_every_closure() -> None:
    accelerator, model, optimizer = parts(2)
    train(accelerator, model, optimizer)
    plain, other, alone = parts(1)
    train(plain, other, alone)
    assert torch.equal(model.weight, other.weight)
