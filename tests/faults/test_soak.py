"""Many steps of every method: memory stays flat, nothing is left behind, at lr = 0 the weights stay bit for bit."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.lab.catalogue import METHODS
from deltasam.objectives import Classification
from helpers.problems import TinyTransformer

WARM = 60  # caches fill, LookSAM and FisherSAM pass through all their phases


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def resident() -> int:
    """Bytes of anonymous memory of the process, on systems that report it.

    Pages of libraries come and go with what the rest of the machine needs.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "VmSwap:")))


def handles() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def hooks(model: nn.Module) -> int:
    found = 0
    for module in model.modules():
        found += len(module._forward_hooks) + len(module._forward_pre_hooks)
        found += len(module._backward_hooks) + len(module._backward_pre_hooks)
    return found + sum(len(p._backward_hooks or ()) for p in model.parameters())


class Net(nn.Module):
    """Small enough for 20,000 steps of every method: an embedding, a norm, dropout, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(11, 4)
        self.body = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Dropout(0.1), nn.Linear(5, 3))

    def forward(self, ids: Tensor) -> Any:
        return self.body(self.embeddings(ids).mean(1))


def soak(name: str, steps: int, build: Callable[[], nn.Module]) -> None:
    model = build().train()
    options = {"embeddings": "embeddings"} if hasattr(METHODS[name](), "embeddings") else {}
    method = METHODS[name](**options)
    if method.needs_adapters:
        method = method.replace(params="trained")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    addresses = [p.data_ptr() for p in model.parameters()]
    random = torch.Generator().manual_seed(0)

    def step() -> None:
        batch = torch.randint(1, 11, (4, 7), generator=random), torch.randint(3, (4,), generator=random)
        method.backward(model, batch, Classification())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    alive, memory, files, start = tensors(), resident(), handles(), time.process_time()
    for _ in range(steps):
        step()
    grown, seconds = resident() - memory, time.process_time() - start
    print(f"{name}: {steps} steps in {seconds:.0f} s of processor time, memory grew by {grown / 2**20:.2f} MiB")
    assert tensors() <= alive  # fewer: what an earlier test had left
    assert handles() <= files
    assert hooks(model) == 0
    assert grown < 8 * 2**20
    assert addresses == [p.data_ptr() for p in model.parameters()]
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert method.steps == WARM + steps


@pytest.mark.parametrize("name", sorted(METHODS))
def test_60_steps(name: str) -> None:
    soak(name, 60, TinyTransformer)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_20000_steps(name: str) -> None:
    soak(name, 20_000, Net)
