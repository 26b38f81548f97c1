"""Low precision, honestly: how much of a move survives the rounding of the weights."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deltasam.branches import is_recorded
from deltasam.distributed import local
from deltasam.perturb import Moved, global_norm


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Leaves the user's autocast region, which surrounds ``method.backward``, before the backward pass."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


_said: set[torch.dtype] = set()


def say_if_rounded_away(moved: Moved, rho: float) -> None:
    """Measures, once per process and dtype, how much of a move of half-precision weights arrived, and says so.

    A SAM-sized move of bfloat16 weights is mostly lost in rounding: on a base-sized model one entry in thirty moves at
    all. With float32 weights there is nothing to measure, and nothing is.
    """
    pairs = [(local(p), w) for p, w in moved.pairs() if p.dtype in (torch.bfloat16, torch.float16)]
    if not pairs or pairs[0][0].dtype in _said or is_recorded(pairs[0][0].device):
        return
    dtype = pairs[0][0].dtype
    _said.add(dtype)
    with torch.no_grad():
        arrived = float(global_norm([p.float() - w.float() for p, w in pairs])) / rho
        share = sum(int((p != w).sum()) for p, w in pairs) / sum(p.numel() for p, _ in pairs)
    warnings.warn(
        f"the weights are {dtype}: of the perturbation of norm {rho:g} {arrived:.0%} arrived and {share:.1%} of the "
        "entries moved at all, the rest is lost in rounding; keep float32 weights and use autocast, or take "
        "PerInstanceSAM, whose perturbation never touches the weights",
        stacklevel=2,
    )
