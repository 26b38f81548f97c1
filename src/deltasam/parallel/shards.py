"""Sharded parameters (``fully_shard``, FSDP2): the part that this process holds, and sums over all parts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def is_distributed() -> bool:
    """Whether several processes may train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was called on, whether or not their parameters are gathered at the moment."""
    return [module for module in model.modules() if is_sharded_module(module)] if is_distributed() else []


def is_sharded_module(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this module itself."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def is_shard(tensor: Any) -> bool:
    """Whether this process holds only a part of the tensor."""
    module = sys.modules.get("torch.distributed.tensor")  # imported if there is a sharded tensor
    return module is not None and isinstance(tensor, module.DTensor)


def any_shard(tensors: Iterable[Any]) -> bool:
    """Whether this process holds only a part of some of these tensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, tensors)))


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, sharing its memory; an ordinary tensor itself."""
    part: Tensor = tensor.detach().to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return part


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """The value as this process's part of a tensor that is sharded as the parameter is."""
    if not is_shard(parameter):
        return value
    whole: Any = parameter
    made: Tensor = type(whole.data).from_local(
        value, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def remembered(value: Tensor, parameter: Tensor) -> Tensor:
    """A tensor from a checkpoint, as this process's part of a tensor that is sharded as the parameter is.

    Raises:
        ValueError: It is the part of another process, or was saved with another number of processes.
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
            f"the state holds {_describe(saved)}, this process {_describe(here)}: every process must save and load "
            "its own file, torch.save(method.state_dict(), f'method-{rank}.pt'), with the same number of processes, "
            "or start without state"
        )
    return shard_like(local(value).to(parameter.device), parameter)


def shard_number(parameter: Any) -> tuple[int, ...]:
    """Which part this process holds; () for an ordinary tensor. Processes with the same part have the same number."""
    if not is_shard(parameter):
        return ()
    place = parameter.device_mesh.get_coordinate()  # of a mesh from a checkpoint: where it was saved
    return tuple(place[d] for d, placement in enumerate(parameter.placements) if placement.is_shard())


def _describe(tensor: Tensor) -> str:
    number = shard_number(tensor)
    return f"{f'part {number} of a' if number else 'a whole'} tensor, shape {tuple(local(tensor).shape)}"


def _place(shard: Any) -> tuple[Any, ...]:
    """Which part of a tensor this is, and how the tensor is divided."""
    return shard_number(shard), shard.shape, tuple(shard.placements), shard.device_mesh.mesh.shape


def totals(numbers: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Numbers (K,), one for each tensor, summed over all parts of that tensor; one message per layout."""
    found = numbers.clone()
    for (mesh, pattern), members in _by_layout(tensors).items():
        part = found[members]
        for dim, is_split in enumerate(pattern):
            if is_split:
                torch.distributed.all_reduce(part, group=mesh.get_group(dim))
        found[members] = part
    return found


def _by_layout(tensors: Sequence[Tensor]) -> dict[Any, list[int]]:
    """The indices of the sharded tensors, by how they are sharded."""
    found: dict[Any, list[int]] = {}
    for k, tensor in enumerate(tensors):
        if is_shard(tensor):
            layout: Any = tensor
            pattern = tuple(placement.is_shard() for placement in layout.placements)
            found.setdefault((layout.device_mesh, pattern), []).append(k)
    return found


def total(values: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of numbers that were computed from tensors, given as ``(number, tensor)``, over all parts of shards.

    Tensors that are sharded in the same way share one message of one number.
    """
    here = [value for value, tensor in values if not is_shard(tensor)]
    for (mesh, pattern), members in _by_layout([tensor for _, tensor in values]).items():
        number = torch.stack([values[k][0] for k in members]).sum()
        for dim, is_split in enumerate(pattern):
            if is_split:
                torch.distributed.all_reduce(number, group=mesh.get_group(dim))
        here.append(number)
    return torch.stack([value.to(here[0].device) for value in here]).sum()
