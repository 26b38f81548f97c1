"""A case of ``rank_cases.py``: layers with norms, each sharded by itself, as trainers shard them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deltasam import PerInstanceSAM
from helpers.problems import cross_entropy, relative_error


def blocks(rank: int, world: int) -> dict[str, float]:
    """FSDP takes the gradients of a layer when its backward is over: none may come later."""
    from torch.distributed.fsdp import fully_shard

    random = torch.Generator().manual_seed(3)
    batch = torch.randn(3 * world, 4, generator=random).double(), torch.randint(3, (3 * world,), generator=random)

    def build() -> Any:
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*layers, nn.Linear(4, 3)).double()

    model, alone = build(), build()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh)
    for _ in range(2):  # the first step of a model is verified, the others are not
        model.zero_grad()
        part = slice(3 * rank, 3 * rank + 3)
        PerInstanceSAM(rho=0.3).backward(model, (batch[0][part], batch[1][part]), cross_entropy)
    PerInstanceSAM(rho=0.3).backward(alone, batch, cross_entropy)
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {"per-instance": relative_error(found, {name: p.grad for name, p in alone.named_parameters()})}
