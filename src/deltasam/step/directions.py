"""Random directions in weight space, drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from deltasam.parallel.shards import local, shard_like, shard_number
from deltasam.step.branches import main_memory
from deltasam.step.randomness import Seed, seeded_generator

_ALIGNED = 16  # elements


def random_direction(params: Sequence[Tensor], seed: Seed) -> list[Tensor]:
    """A direction r ~ N(0, I), one tensor per parameter, the same for the same seed on the same kind of device.

    All parameters of a device and dtype are drawn in one call. Their tensors are views of one block of memory, aligned
    for vectorised kernels. Processes that hold the same parameters draw the same numbers; of sharded parameters each
    process draws its part. Float64 gets the numbers of float32, so that precisions can be compared along one r.
    """
    direction: list[Tensor | None] = [None] * len(params)
    here = [local(p) for p in params]
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, p in enumerate(params):
        kinds.setdefault((p.device, p.dtype, *shard_number(p)), []).append(i)
    for number, ((device, dtype, *shard), members) in enumerate(kinds.items()):
        sizes = [-(-here[i].numel() // _ALIGNED) * _ALIGNED for i in members]
        # Float32 numbers that only become float64 are freed here: not memory that the main stream would use at once.
        with nullcontext() if dtype is torch.float64 else main_memory(device):
            drawn = torch.empty(sum(sizes), device=device, dtype=torch.float32 if dtype is torch.float64 else dtype)
        flat = drawn.normal_(generator=seeded_generator(device, seed.child(number, *shard))).to(dtype)
        for i, stretch in zip(members, torch.split(flat, sizes), strict=True):
            direction[i] = shard_like(stretch[: here[i].numel()].view(here[i].shape), params[i])
    return [r for r in direction if r is not None]
