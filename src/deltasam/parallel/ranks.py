"""The processes that train one model together, and the tensors that they exchange.

Replicas (``DistributedDataParallel``) each hold the whole model; shards (``fully_shard``, FSDP2) hold a part of every
parameter. A perturbation that is shared by all processes is averaged over the replicas here. Everything else is left
to the wrappers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deltasam._torch import drop_unsharded_gradients, fsdp_parameter_groups, uncompiled
from deltasam.parallel.refusals import (
    refuse_foreign,
    refuse_inside_ddp_forward,
    refuse_join,
    refuse_parts,
    refuse_static_graph,
    refuse_tensor_parallel,
    refuse_unsharded,
)
from deltasam.parallel.shards import is_distributed, is_shard, sharded_modules

Scope = Literal["local", "global"]

_BUCKET = 25 * 2**20  # bytes per message, as in DistributedDataParallel


class Ranks:
    """The processes that train a model, as one step sees them.

    Attributes:
        inner: The model without DDP: passes through it exchange nothing between replicas.
        size: The number of processes.
        sharded: Whether each process holds only a part of the parameters.
        keeps_gradients: Whether replicas do not exchange gradients for now, see
            :meth:`deltasam.step.passes.Passes.fresh_grads`.

    Args:
        model: The model, wrapped or not.
        gather: Whether the step needs whole parameters. Shards are then gathered until :meth:`release`; the gradients
            stay sharded.
    """

    def __init__(self, model: nn.Module, *, gather: bool = False) -> None:
        self.inner, self.size = model, 1
        self.sharded = self.keeps_gradients = False
        self._groups: list[Any] = []
        self._wrapper: DistributedDataParallel | None = None
        self._shards: list[Any] = []
        self._gathered: list[tuple[Any, Any, Any]] = []
        self._is_held = False
        if is_distributed():
            self._find(model)
            if gather and self.sharded:
                self._gather()

    @property
    def replicated(self) -> bool:
        """Whether every process holds the whole model, in ``DistributedDataParallel``."""
        return self._wrapper is not None

    def _find(self, model: nn.Module) -> None:
        refuse_foreign(model)
        wrapped = uncompiled(model)
        if isinstance(wrapped, DistributedDataParallel):
            self._wrapper, self.inner = wrapped, wrapped.module
            self._groups, self.size = [wrapped.process_group], wrapped.process_group.size()
            return
        refuse_inside_ddp_forward(model)
        refuse_parts(model)
        self._shards = sharded_modules(model)
        self.reshard()
        parts: list[Any] = [p for p in model.parameters() if is_shard(p)]
        if not parts:
            return
        refuse_tensor_parallel(parts, fully_sharded=bool(self._shards))
        mesh = parts[0].device_mesh
        self._groups, self.size, self.sharded = mesh.get_all_groups(), mesh.size(), True
        self._set_exchange(True)  # gradients that wait unsharded would be mixed with those of the ascent
        for module in self._shards:  # otherwise FSDP does not wait for the gradients that the ascent reads
            module.set_is_last_backward(True)

    def check(self, scope: Scope, params: Mapping[str, nn.Parameter]) -> None:
        """Raises a ValueError if one of ``params`` would be perturbed by the gradient of one process only.

        Args:
            scope: Whose gradients perturb.
            params: The parameters to be perturbed.
        """
        if self.sharded and scope == "local":
            raise ValueError(
                "scope='local' needs whole parameters on every process, and these are sharded: pass "
                "scope='global' (one perturbation for the batches of all processes), or use DistributedDataParallel"
            )
        if self.sharded:
            refuse_unsharded(params)

    def _gather(self) -> None:
        for module in self._shards:
            for group in fsdp_parameter_groups(module):
                self._gathered.append((group, group.post_forward_mesh_info, group.reshard_after_backward))
                group.post_forward_mesh_info, group.reshard_after_backward = None, False
            module.unshard()
        self.sharded = False  # ordinary tensors until release()

    def release(self) -> None:
        """Shards gathered parameters again, at the end of the step."""
        for group, forward, backward in self._gathered:
            drop_unsharded_gradients(group)  # of a step that failed: the next one would send them
            group.post_forward_mesh_info, group.reshard_after_backward = forward, backward
        self._gathered = []
        self.reshard()

    def reshard(self) -> None:
        """Frees parameters that a pass has gathered: they would not follow when their shards move."""
        if self._gathered:
            return
        for module in self._shards:
            module.reshard()

    def no_sync(self, wanted: bool = True, *, shards: bool = False) -> AbstractContextManager[None]:
        """Inside, replicas accumulate their gradients; the first backward outside averages them over all replicas.

        Args:
            wanted: Whether to do so.
            shards: Do the same with gathered shards, which then accumulate whole gradients.
        """
        if not wanted or (self._wrapper is None and not (shards and self._gathered)):
            return nullcontext()
        if self._wrapper is None:
            return self.shards_held()
        refuse_static_graph(self._wrapper)
        return self._wrapper.no_sync()

    @contextmanager
    def shards_held(self) -> Iterator[None]:
        """Inside, gathered shards exchange no gradients: an ascent would send what earlier parts have accumulated."""
        if not self._gathered or self._is_held:  # the outermost context decides when the exchange continues
            yield
            return
        self._is_held = True
        self._set_exchange(False)
        try:
            yield
        finally:
            self._is_held = False
            self._set_exchange(True)

    def _set_exchange(self, wanted: bool) -> None:
        for module in self._shards:  # all of them, so there is no need to recurse
            module.set_requires_gradient_sync(wanted, recurse=False)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a small tensor over all processes."""
        return value if self.size == 1 else self._reduced(value, torch.distributed.ReduceOp.SUM) / self.size

    def largest(self, value: Tensor) -> Tensor:
        """The largest value of a small tensor over all processes."""
        return value if self.size == 1 else self._reduced(value, torch.distributed.ReduceOp.MAX)

    def _reduced(self, value: Tensor, operation: Any) -> Tensor:
        refuse_join(self._wrapper)
        total = value.clone()
        for group in self._groups:
            torch.distributed.all_reduce(total, op=operation, group=group)
        return total

    def mean_gradients(self, values: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
        """The mean of the gradients of parameters (``like``) over the replicas; None only if None on all of them."""
        present = [value is not None for value in values]
        wrapper = self._wrapper
        assert wrapper is not None
        refuse_join(wrapper)
        if wrapper.find_unused_parameters:  # only then may the processes differ in what they use
            flags = torch.tensor(present, dtype=torch.uint8, device=like[0].device)
            torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=wrapper.process_group)
            present = [bool(flag) for flag in flags.tolist()]
        found: list[Tensor | None] = [None] * len(values)
        for members in _buckets([i for i, is_there in enumerate(present) if is_there], values, like):
            given = [torch.zeros_like(like[i]) if (v := values[i]) is None else v for i in members]
            flat = torch.cat([(value.to_dense() if value.is_sparse else value).flatten() for value in given])
            torch.distributed.all_reduce(flat, group=wrapper.process_group)
            flat /= self.size
            parts = torch.split(flat, [like[i].numel() for i in members])
            for i, part in zip(members, parts, strict=True):
                # In the memory layout of the parameter, as .grad has it.
                found[i] = torch.empty_like(like[i], dtype=part.dtype).copy_(part.view(like[i].shape))
        return found

    @torch.no_grad()
    def share_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Averages ``.grad``, as DDP's backward would have done, unless the user is in its ``no_sync()``.

        While :attr:`keeps_gradients` is set, they are averaged in any case: all processes work on the mean.
        """
        if self._wrapper is None or not (self.keeps_gradients or self._wrapper.require_backward_grad_sync):
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
    """The number of this process; 0 if there is only one."""
    return torch.distributed.get_rank() if is_distributed() else 0


def _buckets(which: Sequence[int], values: Sequence[Tensor | None], like: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of tensors that are sent together: of one device and dtype, up to the size of a bucket."""
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
