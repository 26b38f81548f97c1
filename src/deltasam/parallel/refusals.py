"""Ways to distribute a model that no method supports: each raises one ValueError with the remedy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deltasam._torch import active_ddp, joins_uneven_inputs
from deltasam.parallel.shards import is_shard


def refuse_foreign(model: nn.Module) -> None:
    """Refuses DeepSpeed and the first version of FSDP, which keep the parameters where no method can reach them."""
    if type(model).__module__.split(".")[0] == "deepspeed" or hasattr(next(model.parameters(), None), "ds_id"):
        raise ValueError(
            "the model belongs to DeepSpeed, whose engine owns the parameters and the backward pass: use "
            "DistributedDataParallel or torch.distributed.fsdp.fully_shard instead"
        )
    first = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if first is not None and any(isinstance(module, first.FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is wrapped in FullyShardedDataParallel, which flattens the parameters: use "
            "torch.distributed.fsdp.fully_shard instead (fsdp_version: 2 in accelerate)"
        )


def refuse_parts(model: nn.Module) -> None:
    """Refuses a model of which a part is replicated: only passes through that part would exchange its gradients."""
    composable = sys.modules.get("torch.distributed._composable.replicate")
    kinds = (DistributedDataParallel, *([composable.DDP] if composable is not None else []))
    if not any(issubclass(kind, kinds) for kind in set(map(type, model.modules()))):
        return
    if torch.distributed.get_world_size() > 1:
        name, module = next((name, module) for name, module in model.named_modules() if isinstance(module, kinds))
        raise ValueError(
            f"{f'a part of the model ({name})' if name else 'the model'} is replicated ({type(module).__name__}), and "
            "a method cannot hold back its exchange of gradients there: wrap the whole model in "
            "DistributedDataParallel, and pass the wrapper"
        )


def refuse_unsharded(params: Mapping[str, nn.Parameter]) -> None:
    """Refuses to perturb parameters beside shards whose gradients nothing averages over the processes."""
    for name, p in params.items():
        if not is_shard(p):
            raise ValueError(
                f"scope='global' needs the mean gradient of all processes, and {name} is not sharded, so that nothing "
                "averages its gradient: shard it, too (fully_shard without ignored_params), or leave it out of params"
            )


def inside_ddp_forward(model: nn.Module) -> bool:
    """Whether the forward of a DDP with several processes is running, and the model is a part of what it wraps."""
    outer = active_ddp()
    together = outer is not None and outer.process_group.size() > 1
    replicated = {id(p) for p in outer.module.parameters()} if together else set()
    return any(id(p) in replicated for p in model.parameters())


def refuse_inside_ddp_forward(model: nn.Module) -> None:
    """Refuses a part of a replica inside the forward of its DDP (Lightning): nothing would average its gradients."""
    if inside_ddp_forward(model):
        raise ValueError(
            f"model ({type(model).__name__}) is a part of a model in DistributedDataParallel, inside its forward: "
            "its gradients would not be averaged. Pass the wrapped model; in a LightningModule with manual "
            "optimization that is self.trainer.strategy.model, which calls the module's forward()"
        )


def refuse_tensor_parallel(parts: Sequence[Any], *, fully_sharded: bool) -> None:
    """Refuses tensor parallelism, alone or together with ``fully_shard``."""
    split = any(sum(placement.is_shard() for placement in p.placements) > 1 for p in parts)
    if split or not fully_sharded:
        raise ValueError(
            "the parameters are split by tensor parallelism, under which no method has been tested: use "
            "DistributedDataParallel or torch.distributed.fsdp.fully_shard alone"
        )


def refuse_join(ddp: Any) -> None:
    """Refuses to exchange anything while ``DistributedDataParallel.join()`` is open."""
    if joins_uneven_inputs(ddp):
        raise ValueError(
            "under DistributedDataParallel.join() processes without a batch take part in DDP's own exchanges only, so "
            "the others would wait here forever: pass scope='local' to a method that perturbs weights and does not "
            "edit the final gradient, or give all processes the same number of batches"
        )


def refuse_static_graph(ddp: Any) -> None:
    """Refuses ``no_sync()`` of a DDP with a static graph."""
    if getattr(ddp, "static_graph", False):
        raise ValueError(
            "DistributedDataParallel(static_graph=True) fails, or gives wrong gradients, in no_sync(), which "
            "MicroBatches, at_once, scope='local' in a closure that calls backward(), and PerInstanceSAM's loop need: "
            "leave static_graph out"
        )


def require_whole(what: str, params: Sequence[Any]) -> None:
    """Raises a ValueError if parameters are shards but ``what`` needs all of them."""
    if any(is_shard(p) for p in params):
        raise ValueError(
            f"{what} needs whole parameters on every process, and these are sharded: pass scope='local', which "
            "gathers them during a step, or use DistributedDataParallel"
        )
