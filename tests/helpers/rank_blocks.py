"""Cases of ``rank_cases.py``: layers with norms, each sharded separately, and the state of methods for shards."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deltasam import FriendlySAM, LookSAM, Method, MomentumSAM, PerInstanceSAM
from deltasam._torch import fsdp_parameter_groups
from helpers.problems import relative_error

CAN_SHARD = hasattr(torch.cpu.current_stream(), "record_event")  # a model on a CPU, by this version of torch


def blocks(rank: int, world: int) -> dict[str, float]:
    """FSDP reduces the gradients of a layer at the end of its backward: none may come later."""
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
    # One step: a late gradient would arrive in the second.
    PerInstanceSAM(rho=0.3).backward(model, (batch[0][part], batch[1][part]), objective)
    PerInstanceSAM(rho=0.3).backward(alone, batch, objective)
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    groups = [group for layer in model for group in fsdp_parameter_groups(layer)]
    whole = any(group.post_forward_mesh_info is None or not group.reshard_after_backward for group in groups)
    return {
        "per-instance": relative_error(found, {name: p.grad for name, p in alone.named_parameters()}),
        "gathered after the step": float(whole),
    }


def looped(rank: int, world: int) -> dict[str, float]:
    """The loop over instances of shards, whose number differs between the processes."""
    from torch.distributed.fsdp import fully_shard

    random = torch.Generator().manual_seed(3)
    batches = [torch.randn(5, 2 + r, 4, generator=random).double() for r in range(world)]  # the batch comes second

    def build() -> Any:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)).double()

    def objective(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).cumsum(0).square().sum((0, 2))

    model = build()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model is not covered
        for engine in ("loop", "auto"):
            wanted: dict[str, Tensor] = {}
            for batch in batches:
                alone = build()
                PerInstanceSAM(rho=0.3, engine=engine).backward(alone, batch, objective)
                for name, p in alone.named_parameters():
                    wanted[name] = wanted.get(name, 0) + p.grad / world
            for times in (1, 2):  # a second backward adds to .grad
                PerInstanceSAM(rho=0.3, engine=engine).backward(model, batches[rank], objective)
                got = {name: p.grad.full_tensor() / times for name, p in model.named_parameters()}  # type: ignore[union-attr]
                found[f"{engine} {times}"] = relative_error(got, wanted)
            model.zero_grad()
    return found


def parts(rank: int, world: int) -> dict[str, float]:
    """``at_once`` with shards: the processes have different numbers of parts, some only one."""
    from torch.distributed.fsdp import fully_shard

    random = torch.Generator().manual_seed(3)
    batches = [torch.randn(5 - 3 * (r % 2), 4, generator=random).double() for r in range(world)]

    def build() -> Any:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)).double()

    def objective(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum(1)

    alone, found = build(), {}
    for batch in batches:
        PerInstanceSAM(rho=0.3).backward(alone, batch, objective, scale=1 / world)
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    for engine in ("low-rank", "loop"):
        model = build()
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh)
        for times in (1, 2):  # a second backward adds to .grad
            PerInstanceSAM(rho=0.3, engine=engine, at_once=2).backward(model, batches[rank], objective)
            got = {name: p.grad.full_tensor() / times for name, p in model.named_parameters()}
            found[f"{engine} {times}"] = relative_error(got, wanted)
    return found


def kept(rank: int, world: int) -> dict[str, Any]:
    """The state of methods for shards, saved by every process for itself, or by another process."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    random = torch.Generator().manual_seed(rank)
    batch = torch.randn(3, 4, generator=random).double()

    def step(method: Method) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = nn.Linear(4, 2 * world).double()  # parts of one shape, so that the shape does not distinguish them
        fully_shard(model, mesh=mesh)
        method.backward(model, batch, lambda model, batch: model(batch).square().sum(1))
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]

    found: dict[str, Any] = {}
    for method in (LookSAM(rho=0.3, k=3), FriendlySAM(rho=0.3, sigma=0.5), MomentumSAM(rho=0.3)):
        method = method.replace(scope="global")
        step(method)
        file = io.BytesIO()
        torch.save(method.state_dict(), file)
        files: list[Any] = [None] * world
        dist.all_gather_object(files, file.getvalue())
        wanted = step(method)

        def resumed(by: int, method: Method = method, files: Any = files, wanted: Any = wanted) -> float:
            again = method.replace(state={})
            again.load_state_dict(torch.load(io.BytesIO(files[by])))
            return relative_error(step(again), wanted)

        name = type(method).__name__
        found[f"{name} own"] = resumed(rank)
        try:
            resumed((rank + 1) % world)
        except ValueError as error:
            found[f"{name} other"] = str(error)
        else:
            found[f"{name} other"] = "nothing was refused"
    return found
