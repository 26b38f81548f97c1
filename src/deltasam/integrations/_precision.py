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
    """Runs the body under Accelerate's autocast, and the model's ``forward`` without its own.

    Accelerate hides autocast inside a replaced ``forward``, where other code can neither see nor disable it:
    delta-SAM's probes, which need float32, would silently run in bfloat16. This context makes it an ordinary autocast
    region, as in a plain PyTorch loop. The outputs are still float32. The model is restored afterwards.
    """
    if accelerator.mixed_precision not in ("bf16", "fp16"):
        yield
        return
    # Accelerate's unwrap_model would remove DDP from a compiled model permanently.
    inner: Any = model if "_original_forward" in vars(model) else unwrapped(model)
    hidden = vars(inner).get("forward")
    original = vars(inner).get("_original_forward")
    if hidden is None or original is None:
        yield
        return
    if isinstance(original, MethodType):
        inner.forward = MethodType(_in_float32(original.__func__), inner)
    else:  # replaced before, for example by the hooks of device_map
        inner.forward = _in_float32.__wrapped__(original)  # not cached: it would keep the model alive
    try:
        with accelerator.autocast():
            yield
    finally:
        inner.forward = hidden


@lru_cache(maxsize=16)
def _in_float32(forward: Any) -> Any:
    """Converts the outputs of a function to float32. Cached, because ``torch.compile`` recompiles for a new one."""
    from accelerate.utils import convert_outputs_to_fp32

    return convert_outputs_to_fp32(forward)
