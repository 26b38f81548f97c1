"""Accelerate's mixed precision, moved from inside the model's ``forward`` to around the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import MethodType
from typing import Any

from torch import nn

from deltasam.objectives.batch import unwrapped


@contextmanager
def visible_autocast(accelerator: Any, model: nn.Module) -> Iterator[None]:
    """Runs the inside under Accelerate's autocast, and the model's ``forward`` without one of its own.

    Accelerate hides autocast inside a replaced ``forward``, where nobody can see or lift it: delta-SAM's probes, which
    are to run in float32, would silently run in bfloat16. Inside this context it is an ordinary autocast region, as in
    a plain PyTorch loop; the outputs still come out in float32. The model is as it was afterwards.
    """
    if accelerator.mixed_precision not in ("bf16", "fp16"):
        yield
        return
    # Not Accelerate's unwrap_model, which takes DDP out of a compiled model for good.
    inner: Any = model if "_original_forward" in vars(model) else unwrapped(model)
    hidden = vars(inner).get("forward")
    original = vars(inner).get("_original_forward")
    if hidden is None or original is None:
        yield
        return
    if isinstance(original, MethodType):
        inner.forward = MethodType(_in_float32(original.__func__), inner)
    else:  # replaced already, by the hooks of device_map for example
        inner.forward = _in_float32.__wrapped__(original)  # not kept: it holds the model
    try:
        with accelerator.autocast():
            yield
    finally:
        inner.forward = hidden


@lru_cache(maxsize=16)
def _in_float32(forward: Any) -> Any:
    """The function with outputs in float32; the same one every time, or ``torch.compile`` would start anew."""
    from accelerate.utils import convert_outputs_to_fp32

    return convert_outputs_to_fp32(forward)
