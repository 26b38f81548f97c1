"""An ordinary step of a captured method equals that of the method: shards are released, errors are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deltasam.methods import SAM
from deltasam.speed.capture import Captured, _captured
from helpers.problems import grads, relative_error


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1).square()


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A process group of this process alone."""
    if not hasattr(torch.cpu.current_stream(), "record_event"):
        pytest.skip("this version of torch cannot shard a model on a CPU")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def sharded(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("graphs", [False, True])
def test_shards_are_released(mesh: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if graphs:
        monkeypatch.setattr(_captured, "HAS_GRAPHS", ("cpu",))
    x, found = torch.randn(4, 3), []
    for wrap in (lambda m: m, Captured):
        model, method = sharded(mesh), wrap(SAM(rho=0.1))
        if graphs and wrap is Captured:
            with pytest.warns(UserWarning, match=r"fully_shard.*call the method itself"):
                method.backward(model, x, objective)
        else:
            method.backward(model, x, objective)
        assert {type(p.data).__name__ for p in model.parameters()} == {"DTensor"}
        found.append({name: grad.full_tensor() for name, grad in grads(model).items()})
        assert method.steps == 1
    assert len(found[0]) == 4
    assert relative_error(*found) == 0


@pytest.mark.parametrize("graphs", [False, True])
def test_errors_are_those_of_the_method(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if graphs:
        monkeypatch.setattr(_captured, "HAS_GRAPHS", ("cpu",))
    model = nn.Linear(3, 1)

    def hungry(model: nn.Module, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    def eager(model: nn.Module, x: Tensor) -> Tensor:
        losses = objective(model, x)
        losses.mean().backward()
        return losses

    captured = Captured(SAM())
    with pytest.raises(torch.OutOfMemoryError, match="SAM ran out of memory in pass 1"):
        captured.backward(model, torch.ones(4, 3), hungry)
    with pytest.raises(RuntimeError, match="the objective must only compute the losses"):
        captured.backward(model, torch.ones(4, 3), eager)
    assert captured.steps == 0


def test_errors_of_a_whole_step_are_those_of_the_method() -> None:
    model = nn.Linear(3, 1)
    captured = Captured(SAM(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def hungry(model: nn.Module, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match="SAM ran out of memory in pass 1"):
        captured.step(model, torch.ones(4, 3), hungry)
    captured.step(model, torch.ones(4, 3), objective)
    assert captured.steps == 1
