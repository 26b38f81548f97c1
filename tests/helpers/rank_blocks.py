"""A case of ``rank_cases.py``: layers with norms, each sharded by itself, as trainers shard them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deltasam import PerInstanceSAM
from helpers.problems import relative_error

CAN_SHARD = hasattr(torch.cpu.current_stream(), "record_event")  # a model on a CPU, by this version of torch


def blocks(rank: int, world: int) -> dict[str, float]:
    """FSDP takes the gradients of a layer when its backward is over: none may come later."""
    from torch.distributed.fsdp import fully_shard

    random = torch.Generator().manual_seed(3)
    batch = torch.randn(3 * world, 5, 4, generator=random).double(), torch.randint(3, (3 * world,), generator=random)

    def build() -> Any:
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*layers, nn.Linear(4, 3)).double()

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).mean(1), batch[1], reduction="none")

    model, alone = build(), build()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh)
    part = slice(3 * rank, 3 * rank + 3)
    # One step: a gradient that is late is there in the second.
    PerInstanceSAM(rho=0.3).backward(model, (batch[0][part], batch[1][part]), objective)
    PerInstanceSAM(rho=0.3).backward(alone, batch, objective)
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return {"per-instance": relative_error(found, {name: p.grad for name, p in alone.named_parameters()})}
