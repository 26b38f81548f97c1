"""What an objective must return, and the clear words for what it returned instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_losses(losses: Any, *, graph: bool) -> None:
    """One clear error for each way an objective can go wrong.

    Raises:
        TypeError: Not a floating-point tensor.
        ValueError: Not of shape (N,), empty, or without a graph.
    """
    if not isinstance(losses, Tensor):
        raise TypeError(f"the objective returned {type(losses).__name__}, not a tensor of losses of shape (N,)")
    if losses.ndim == 0:
        raise ValueError(
            "the objective returned a scalar; methods need the loss of every instance, shape (N,): compute it with "
            "reduction='none', or use deltasam.Classification() and its relatives, which take Hugging Face models"
        )
    if losses.ndim != 1:
        shape = tuple(losses.shape)
        raise ValueError(f"the objective returned losses of shape {shape}, not (N,): reduce or squeeze them")
    if not losses.is_floating_point():
        raise TypeError(f"the objective returned {losses.dtype} losses; they must be floating point")
    if losses.shape[0] == 0:
        raise ValueError("the objective returned no losses: the batch is empty")
    if graph and not losses.requires_grad:
        raise ValueError(
            "the losses do not depend on any trainable parameter: the objective detached them, ran under no_grad, or "
            "used only frozen parts of the model"
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an accelerator, or the host, had no memory left."""
    host = ("DefaultCPUAllocator", "can't allocate memory", "bad_alloc")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in host)
