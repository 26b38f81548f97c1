"""Autocast to bfloat16 that is also fast on a CPU without bfloat16 instructions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from deltasam._torch import CPU_ATTENTION, TorchDispatchMode, cpu_has_bfloat16, tree_map_only

_aten: Any = torch.ops.aten
_PRODUCTS = (
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot, _aten.convolution,
    _aten.convolution_backward, *CPU_ATTENTION,
)  # fmt: skip


class WideProducts(TorchDispatchMode):
    """Computes products of bfloat16 numbers in float32 and rounds once, as hardware with bfloat16 does.

    On a CPU without bfloat16 torch's fallback takes minutes where float32 takes a second (BERT-small, four sentences).
    Cost: casts to float32 and back around every product.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        low = any(isinstance(arg, Tensor) and arg.dtype is torch.bfloat16 for arg in args)
        if not low or getattr(func, "overloadpacket", None) not in _PRODUCTS:
            return func(*args, **named)
        wide, also = tree_map_only(Tensor, _widened, (args, named))
        return tree_map_only(Tensor, lambda t: t.bfloat16() if t.dtype is torch.float32 else t, func(*wide, **also))


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


@contextmanager
def bfloat16(device: torch.device) -> Iterator[None]:
    """Autocast to bfloat16; on a CPU without it the same numbers are computed in float32.

    If oneDNN refuses a product in bfloat16, torch disables oneDNN for the process. This context enables it again.
    """
    slow = device.type == "cpu" and not cpu_has_bfloat16()
    enabled = torch.backends.mkldnn.enabled
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16), WideProducts() if slow else nullcontext():
            yield
    finally:
        torch.backends.mkldnn.enabled = enabled
