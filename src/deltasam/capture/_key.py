"""Which steps can share a graph: everything a recording has baked in must be the same."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class NotCapturableError(Exception):
    """A step that cannot be recorded; says why."""


def batch_key(batch: Any) -> Hashable:
    """Shapes, dtypes and devices of the tensors, and everything else by value.

    Raises:
        NotCapturableError: Something in the batch can be neither copied into a fixed place nor compared.
    """
    if isinstance(batch, Tensor):
        return (tuple(batch.shape), batch.dtype, batch.device)
    if isinstance(batch, Mapping):
        return tuple((key, batch_key(value)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return (type(batch).__name__, *(batch_key(value) for value in batch))
    if batch is None or isinstance(batch, (bool, int, float, str)):
        return batch
    raise NotCapturableError(f"the batch holds a {type(batch).__name__}, which is neither a tensor nor a plain value")


def model_key(model: nn.Module) -> Hashable:
    """The modes of the modules, and the address, trainability and gradient of every parameter."""
    return (
        id(model),
        tuple(module.training for module in model.modules()),
        tuple((p.data_ptr(), p.requires_grad) for p in model.parameters()),
    )


def surroundings_key(device: torch.device) -> Hashable:
    """What of the world around a step decides which kernels it launches."""
    kind = device.type
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
