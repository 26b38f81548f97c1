"""Several processes that train one model: who holds what of it, and what they tell each other.

Replicas (``DistributedDataParallel``) hold all of the model each; shards (``fully_shard``, FSDP2) a part of every
parameter. What is computed from whole gradients (norms, inner products) is added up over the shards here; what one
perturbation for all batches needs is averaged over the replicas here. Everything else is the wrappers' own business.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deltasam._torch import active_ddp, fsdp_parameter_groups, joins_uneven_inputs, uncompiled

Scope = Literal["local", "global"]

_BUCKET = 25 * 2**20  # bytes sent at a time, as DistributedDataParallel does


class Ranks:
    """The processes that train a model, as one step sees them.

    Attributes:
        inner: The model without its wrapper: passes through it communicate nothing (replicas), or what they must.
        size: How many processes there are.
        sharded: Whether each holds a part of the parameters only.
        apart: Whether gradients are kept to this process for now, see :meth:`deltasam.step.passes.Passes.fresh_grads`.

    Args:
        model: The model, wrapped or not.
        gather: Whether the step needs whole parameters: shards are then gathered for its length and the gradients
            stay sharded, until :meth:`release`.
    """

    def __init__(self, model: nn.Module, *, gather: bool = False) -> None:
        self.inner, self.size = model, 1
        self.sharded = self.apart = False
        self._groups: list[Any] = []
        self._wrapper: DistributedDataParallel | None = None
        self._shards: list[Any] = []
        self._gathered: list[tuple[Any, Any, Any]] = []
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._find(model)
            if gather and self.sharded:
                self._gather()

    @property
    def replicated(self) -> bool:
        """Whether every process holds all of the model."""
        return self._wrapper is not None

    def _find(self, model: nn.Module) -> None:
        refuse_foreign(model)
        wrapped = uncompiled(model)
        if isinstance(wrapped, DistributedDataParallel):
            self._wrapper, self.inner = wrapped, wrapped.module
            self._groups, self.size = [wrapped.process_group], wrapped.process_group.size()
            return
        _refuse_inside(model)
        self._shards = sharded_modules(model)
        self.settle()
        parts: list[Any] = [p for p in model.parameters() if is_shard(p)]
        if not parts:
            return
        _refuse_tensor_parallel(parts, fully_sharded=bool(self._shards))
        mesh = parts[0].device_mesh
        self._groups, self.size, self.sharded = mesh.get_all_groups(), mesh.size(), True
        for module in self._shards:  # gradients that wait unsharded would be mixed with those of the ascent
            module.set_requires_gradient_sync(True)

    def check(self, scope: Scope) -> None:
        """Refuses to perturb shards by one process's gradient.

        Raises:
            ValueError: The parameters are sharded and ``scope`` is ``"local"``.
        """
        if self.sharded and scope == "local":
            raise ValueError(
                "scope='local' needs whole parameters on every process, these are sharded: pass "
                "scope='global' (one perturbation for the batches of all), or use DistributedDataParallel"
            )

    def _gather(self) -> None:
        for module in self._shards:
            for group in fsdp_parameter_groups(module):
                self._gathered.append((group, group.post_forward_mesh_info, group.reshard_after_backward))
                group.post_forward_mesh_info, group.reshard_after_backward = None, False
            module.unshard()
        self.sharded = False  # ordinary tensors, for as long as they are here

    def release(self) -> None:
        """Gives gathered parameters back, at the end of the step."""
        for group, forward, backward in self._gathered:
            group.post_forward_mesh_info, group.reshard_after_backward = forward, backward
        self._gathered = []
        self.settle()

    def settle(self) -> None:
        """Lets parameters go that a pass has gathered: they would not follow when their shards move."""
        if self._gathered:
            return
        for module in self._shards:
            module.reshard()

    def quiet(self, wanted: bool = True) -> AbstractContextManager[None]:
        """Replicas add their gradients up by themselves inside; the next backward outside takes the mean of all."""
        if not wanted or self._wrapper is None:
            return nullcontext()
        if getattr(self._wrapper, "static_graph", False):
            raise ValueError(
                "DistributedDataParallel(static_graph=True) fails, or gives wrong gradients, in no_sync(), which "
                "MicroBatches, scope='local' in a closure that calls backward(), and PerInstanceSAM's loop need: "
                "leave static_graph out"
            )
        return self._wrapper.no_sync()

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a small tensor over all processes."""
        if self.size == 1:
            return value
        self._refuse_join()
        total = value.clone()
        for group in self._groups:
            torch.distributed.all_reduce(total, group=group)
        return total / self.size

    def mean_gradients(self, values: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
        """The mean of gradients over the replicas, None only where it is None for all of them.

        Args:
            values: One gradient per parameter.
            like: The parameters.
        """
        present = [value is not None for value in values]
        wrapper = self._wrapper
        assert wrapper is not None
        self._refuse_join()
        if wrapper.find_unused_parameters:  # only then may the processes differ in what they use
            flags = torch.tensor(present, dtype=torch.uint8, device=like[0].device)
            torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=wrapper.process_group)
            present = [bool(flag) for flag in flags.tolist()]
        found: list[Tensor | None] = [None] * len(values)
        for members in _buckets([i for i, is_there in enumerate(present) if is_there], values, like):
            flat = torch.cat([_dense(values[i], like[i]).flatten() for i in members])
            torch.distributed.all_reduce(flat, group=wrapper.process_group)
            flat /= self.size
            parts = torch.split(flat, [like[i].numel() for i in members])
            for i, part in zip(members, parts, strict=True):
                # In the layout of the parameter, which .grad takes after.
                found[i] = torch.empty_like(like[i], dtype=part.dtype).copy_(part.view(like[i].shape))
        return found

    def _refuse_join(self) -> None:
        """One sentence for DDP's ``join``: who has no batch left answers DDP's own exchanges, and no others."""
        if joins_uneven_inputs(self._wrapper):
            raise ValueError(
                "under DistributedDataParallel.join() processes without a batch answer what DDP exchanges by itself, "
                "and would leave the others waiting here: pass scope='local', to a method other than GSAM, "
                "LookSAM and those that perturb embeddings, or give all processes the same number of batches"
            )

    @torch.no_grad()
    def share_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """What the wrapper's backward would have done to ``.grad``, unless the user holds it back (``no_sync``).

        What all processes are to work on together cannot be held back.
        """
        if self._wrapper is None or not (self.apart or self._wrapper.require_backward_grad_sync):
            return
        for p, mean in zip(params, self.mean_gradients([p.grad for p in params], params), strict=True):
            if p.grad is not None and mean is not None and not p.grad.is_sparse:
                p.grad.copy_(mean)
            else:
                p.grad = mean
        if self._wrapper.broadcast_buffers:
            group = self._wrapper.process_group
            for buffer in self._wrapper.modules_buffers:
                torch.distributed.broadcast(buffer, torch.distributed.get_global_rank(group, 0), group=group)


def rank() -> int:
    """The number of this process, 0 where there is but one."""
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if known else 0


# -- shards -----------------------------------------------------------------------------------------------------------


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was called on, whether their parameters are gathered at the moment or not."""
    return [module for module in model.modules() if is_sharded_module(module)]


def is_sharded_module(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this very module."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def is_shard(tensor: Any) -> bool:
    """Whether this process holds only a part of the tensor."""
    module = sys.modules.get("torch.distributed.tensor")  # who has a sharded tensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies here, sharing its memory; an ordinary tensor is all here."""
    part: Tensor = tensor.detach().to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return part


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """The value as this process's part of a tensor that lies as the parameter does."""
    if not is_shard(parameter):
        return value
    whole: Any = parameter
    made: Tensor = type(whole.data).from_local(
        value, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def remembered(value: Tensor, parameter: Tensor) -> Tensor:
    """What a checkpoint holds of a tensor that lies as the parameter does, as the part of it that lies here.

    Raises:
        ValueError: It is the part of another process, or of another number of them.
    """
    saved: Any = value
    here: Any = parameter
    if is_shard(saved) and is_shard(here):
        if saved.device_mesh is here.device_mesh:  # not from a checkpoint
            return value
        fits = _place(saved) == _place(here)
    else:
        fits = not is_shard(saved) and saved.shape == local(here).shape  # the part alone
    if not fits:
        raise ValueError(
            f"the state holds {_told(saved)}, this process {_told(here)}: let every process save and load a file of "
            "its own, torch.save(method.state_dict(), f'method-{rank}.pt'), with as many processes as before; or "
            "start without state"
        )
    return shard_like(local(value).to(parameter.device), parameter)


def shard_number(parameter: Any) -> tuple[int, ...]:
    """Which part lies here: the same for processes that hold the same part; () for an ordinary tensor."""
    if not is_shard(parameter):
        return ()
    place = parameter.device_mesh.get_coordinate()  # of a mesh from a checkpoint: where it was saved
    return tuple(place[d] for d, placement in enumerate(parameter.placements) if placement.is_shard())


def _told(tensor: Tensor) -> str:
    number = shard_number(tensor)
    return f"{f'part {number} of a' if number else 'a whole'} tensor, shape {tuple(local(tensor).shape)}"


def _place(shard: Any) -> tuple[Any, ...]:
    """Which part of a tensor this is, and of which division of it."""
    return shard_number(shard), shard.shape, tuple(shard.placements), shard.device_mesh.mesh.shape


def total(values: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of numbers computed from tensors: ``(number, tensor)``; of shards, the numbers of all parts are added.

    One message of one number for all tensors that are laid out alike.
    """
    here = [value for value, tensor in values if not is_shard(tensor)]
    apart: dict[Any, list[Tensor]] = {}
    for value, tensor in values:
        if is_shard(tensor):
            layout: Any = tensor
            pattern = tuple(placement.is_shard() for placement in layout.placements)
            apart.setdefault((layout.device_mesh, pattern), []).append(value)
    for (mesh, pattern), members in apart.items():
        number = torch.stack(members).sum()
        for dim, is_split in enumerate(pattern):
            if is_split:
                torch.distributed.all_reduce(number, group=mesh.get_group(dim))
        here.append(number)
    return torch.stack([value.to(here[0].device) for value in here]).sum()


# -- what is refused --------------------------------------------------------------------------------------------------


def refuse_foreign(model: nn.Module) -> None:
    """One sentence for wrappers that keep the parameters where no method can reach them.

    Raises:
        ValueError: For DeepSpeed and for the first version of FSDP.
    """
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


def inside_ddp_forward(model: nn.Module) -> bool:
    """Whether a DDP of several processes is in its forward, and the model is a part of what it wraps."""
    outer = active_ddp()
    together = outer is not None and outer.process_group.size() > 1
    replicated = {id(p) for p in outer.module.parameters()} if together else set()
    return any(id(p) in replicated for p in model.parameters())


def _refuse_inside(model: nn.Module) -> None:
    """One sentence for a part of a replica while DDP is in its forward: nothing would average its gradients.

    Lightning calls ``training_step`` in there, and has its ``manual_backward`` prepare DDP for the backward.
    """
    if inside_ddp_forward(model):
        raise ValueError(
            f"model ({type(model).__name__}) is a part of a model in DistributedDataParallel, inside of its forward: "
            "the gradients would stay in each process. Pass the wrapped model; in a LightningModule with manual "
            "optimization that is self.trainer.strategy.model, which calls the module's forward()"
        )


def _refuse_tensor_parallel(parts: Sequence[Any], *, fully_sharded: bool) -> None:
    split = any(sum(placement.is_shard() for placement in p.placements) > 1 for p in parts)
    if split or not fully_sharded:
        raise ValueError(
            "the parameters are split by tensor parallelism, under which no method has been tested: use "
            "DistributedDataParallel or torch.distributed.fsdp.fully_shard alone"
        )


def require_whole(what: str, params: Sequence[Any]) -> None:
    """Raises a ValueError where parameters are shards but ``what`` needs all of them."""
    if any(is_shard(p) for p in params):
        raise ValueError(
            f"{what} needs whole parameters on every process, these are sharded: pass scope='local', which "
            "gathers them for the length of a step, or use DistributedDataParallel"
        )


# -- details ----------------------------------------------------------------------------------------------------------


def _dense(value: Tensor | None, like: Tensor) -> Tensor:
    given = torch.zeros_like(like) if value is None else value
    return given.to_dense() if given.is_sparse else given


def _buckets(which: Sequence[int], values: Sequence[Tensor | None], like: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of what can be sent together: one device and dtype, up to the size of a bucket."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i in which:
        given = values[i]
        kinds.setdefault((like[i].device, like[i].dtype if given is None else given.dtype), []).append(i)
    for members in kinds.values():
        bucket: list[int] = []
        size = 0
        for i in members:
            bucket.append(i)
            size += like[i].numel() * like[i].element_size()
            if size >= _BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
