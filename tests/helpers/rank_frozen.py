"""Cases of ``rank_cases.py``: adapters are trained, frozen weights are perturbed; under DDP and ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deltasam import SAM, MicroBatches, PerInstanceSAM
from deltasam.integrations import MethodOptimizer
from deltasam.methods import ASAM, GSAM, DeltaSAM, FriendlySAM, LookSAM, Method
from helpers.frozen import ADAPTED_NO_DROPOUT
from helpers.problems import cross_entropy, relative_error

PART = 3
METHODS: dict[str, Callable[..., Method]] = {
    "sam": SAM,
    "asam": ASAM,
    "delta-sam": DeltaSAM,
    "gsam": GSAM,
    "look-sam": LookSAM,
    "friendly-sam": FriendlySAM,
    "per-instance": lambda **o: PerInstanceSAM(engine="low-rank", **o),
    "per-instance-groups": lambda **o: PerInstanceSAM(group=PART, **o),
    "per-instance-loop": lambda **o: PerInstanceSAM(engine="loop", **o),
}


def _model() -> nn.Module:
    return ADAPTED_NO_DROPOUT.make()[0]


def _batch(world: int) -> Any:
    return ADAPTED_NO_DROPOUT.make(size=PART * world)[1]


def _part(batch: Any, rank: int) -> Any:
    return tuple(value[PART * rank : PART * (rank + 1)] for value in batch)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for name, g in found.items()}


def _alone(method: Method, batch: Any, steps: int) -> dict[str, Tensor]:
    model = _model()
    for _ in range(steps):
        model.zero_grad()
        method.backward(model, batch, cross_entropy)
    return _gradients(model)


def _compared(model: nn.Module, make: Callable[..., Method], scope: str, rank: int, world: int) -> dict[str, float]:
    """The error of the gradient, and whether something frozen was touched."""
    batch, method = _batch(world), make(scope=scope, rho=0.1, params="base")
    steps = 2 if method.buffers else 1
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    for _ in range(steps):
        model.zero_grad()
        method.backward(model, _part(batch, rank), cross_entropy)
    if scope == "global":
        wanted = _alone(make(rho=0.1, params="base"), batch, steps)
    else:
        each = [_alone(make(rho=0.1, params="base"), _part(batch, r), steps) for r in range(world)]
        wanted = {name: torch.stack([grads[name] for grads in each]).mean(0) for name in each[0]}
    changed = 0
    for name, p in model.named_parameters():
        pointer, value = before[name]
        now, then = (t.to_local() if hasattr(t, "to_local") else t for t in (p.detach(), value))
        changed += not torch.equal(now, then) or p.data_ptr() != pointer
        changed += (p.grad is None) == p.requires_grad
        changed += p.requires_grad != ("lora_" in name or "classifier" in name)
    return {"gradient": relative_error(_gradients(model), wanted), "changed": float(changed)}


def frozen_replicas(rank: int, world: int) -> dict[str, float]:
    """Under DDP, which knows only of the parameters that are trained."""
    found = {}
    for name, make in METHODS.items():
        for scope in ("local", "global"):
            if scope == "global" and name in ("per-instance-groups", "per-instance-loop"):
                continue  # a group never spans processes
            each = _compared(DistributedDataParallel(_model()), make, scope, rank, world)
            found |= {f"{name} {scope} {what}": value for what, value in each.items()}
    batch = _part(_batch(world), rank)
    for scope in ("local", "global"):
        given = SAM(rho=0.1, params="base", scope=scope)
        plain, closed = DistributedDataParallel(_model()), DistributedDataParallel(_model())
        given.backward(plain, batch, cross_entropy)
        optimizer = MethodOptimizer(torch.optim.SGD(closed.parameters(), lr=0.0), given, closed, closure="backward")

        def closure(model: nn.Module = closed, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model, batch).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        found[f"closure {scope}"] = relative_error(_gradients(closed), _gradients(plain))
    whole, split = DistributedDataParallel(_model()), DistributedDataParallel(_model())
    PerInstanceSAM(rho=0.1, params="base").backward(whole, batch, cross_entropy)
    parts = MicroBatches([tuple(value[:1] for value in batch), tuple(value[1:] for value in batch)])
    PerInstanceSAM(rho=0.1, params="base").backward(split, parts, cross_entropy)
    found["micro-batches"] = relative_error(_gradients(split), _gradients(whole))
    return found


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.frozen, model.feed, model.back, model):
        fully_shard(module, mesh=mesh)
    return model


def frozen_shards(rank: int, world: int) -> dict[str, float]:
    """Under ``fully_shard``, which shards frozen parameters, too."""
    found = {}
    for name, make in METHODS.items():
        scopes = ["local", "global"] if name in ("sam", "asam", "friendly-sam") else ["local"]
        scopes = ["global"] if make().edits_gradient else scopes
        for scope in scopes if name != "delta-sam" else []:  # its directions differ between shards
            each = _compared(sharded(_model()), make, scope, rank, world)
            found |= {f"{name} {scope} {what}": value for what, value in each.items()}
    return found
