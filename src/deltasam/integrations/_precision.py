"""Accelerate's mixed precision, moved from inside the model's ``forward`` to around the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn


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
    # To unwrap goes through all modules and looks for packages, in every step: not where Accelerate's forward is seen.
    bare = "_original_forward" in vars(model) and "_orig_mod" not in vars(model)
    inner: Any = model if bare else accelerator.unwrap_model(model)
    hidden = vars(inner).get("forward")
    original = vars(inner).get("_original_forward")
    if hidden is None or original is None:
        yield
        return
    from accelerate.utils import convert_outputs_to_fp32

    if isinstance(original, MethodType):
        inner.forward = MethodType(convert_outputs_to_fp32(original.__func__), inner)
    else:  # replaced already, by the hooks of device_map for example
        inner.forward = convert_outputs_to_fp32(original)
    try:
        with accelerator.autocast():
            yield
    finally:
        inner.forward = hidden
