"""Low precision, honestly: how much of a move survives the rounding of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.branches import is_recorded
from deltasam.distributed import local, sharded_modules
from deltasam.perturb import Moved, global_norm


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Leaves the user's autocast region, which surrounds ``method.backward``, before the backward pass."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def gathered_as(model: nn.Module) -> torch.dtype | None:
    """In which other dtype FSDP gathers the weights of a sharded model for its passes; None if it does not."""
    policies = [getattr(module._get_fsdp_state(), "_mp_policy", None) for module in sharded_modules(model)]
    return next((policy.param_dtype for policy in policies if policy is not None and policy.param_dtype), None)


_HALF = (torch.bfloat16, torch.float16)
_said: set[torch.dtype] = set()


def length_to_check(params: Sequence[Tensor], direction: Sequence[Tensor | None], step: Tensor) -> float | None:
    """How far half-precision weights are about to be moved, if that is to be checked by :func:`say_if_rounded_away`.

    None where there is nothing to check: with float32 weights, if it was said already, or if the step is skipped (then
    the next one is checked). Not rho: the moves of ASAM and FisherSAM have other lengths.
    """
    pairs = [(p, d) for p, d in zip(params, direction, strict=True) if d is not None and p.dtype in _HALF]
    if not pairs or pairs[0][0].dtype in _said or is_recorded(pairs[0][0].device):
        return None
    return float(step * global_norm([d for _, d in pairs]).to(step.device)) or None


def say_if_rounded_away(moved: Moved, length: float | None) -> None:
    """Measures, once per process and dtype, how much of a move of half-precision weights arrived, and says so.

    A SAM-sized move of bfloat16 weights is mostly lost in rounding: on a base-sized model one entry in thirty moves at
    all. With float32 weights there is nothing to measure, and nothing is.
    """
    if length is None:
        return
    pairs = [(local(p), w) for p, w in moved.pairs() if p.dtype in _HALF]
    dtype = pairs[0][0].dtype
    _said.add(dtype)
    with torch.no_grad():
        arrived = float(global_norm([p.float() - w.float() for p, w in pairs])) / length
        share = sum(int((p != w).sum()) for p, w in pairs) / sum(p.numel() for p, _ in pairs)
    warnings.warn(
        f"the weights are {dtype}: of the perturbation of norm {length:.3g} {arrived:.0%} arrived and {share:.1%} of "
        "the entries moved at all, the rest is lost in rounding; keep float32 weights and use autocast, or take "
        "PerInstanceSAM, whose perturbation never touches the weights",
        stacklevel=2,
    )
