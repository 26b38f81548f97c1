r"""Linear layers in float32 on the tensor cores of a GPU, which multiply float16 numbers an order of magnitude faster.

A float32 number is, up to its last bit, the sum of two float16 numbers of 11 bits and a sign: x = h + l, after its row
was scaled by a power of two. So

.. math:: x \cdot w \approx l_x h_w + h_x l_w + h_x h_w

is one float16 product with three times as many columns, which the GPU accumulates in float32. What is left out,
:math:`l_x l_w`, is at most 2^-24 of the product; adding up the products in float32 costs more.

Ootomo and Yokota, Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak
performance, 2022.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from deltasam._torch import any_compiled, is_compiler_loaded
from deltasam.step.branches import is_recorded

# Where float16 is at least eight times as fast as float32: A100, H100 and H200, B200, B300. On GPUs for graphics it is
# two or four times as fast, and three products cost as much as one in float32.
_CAPABILITIES = {(8, 0), (9, 0), (10, 0), (10, 3)}
_ROWS = 512  # with fewer, splitting the weights costs more than it saves
_LOW, _HIGH = 15, 254  # exponents of float32 for which both scales are ordinary numbers
_TARGET = 268  # 2 * 127 + 14: the largest number of a row is scaled to 2^14 ... 2^15, the top of float16
_BLOCK = 1024
_TOLERANCE = 1e-6  # of a sum of 2,000 products, relative to the norms of its factors; TF32 reaches 2e-5
_log = logging.getLogger(__name__)
_ready: dict[torch.device, bool] = {}


@contextmanager
def fast_products(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Float32 linear layers of a recorded pass without a graph are computed on tensor cores, where that is faster.

    Outside a recording nothing changes: intercepting the layers would cost more time on the host than is saved. A
    compiled model calls its own products.
    """
    used = is_ready(device) and is_recorded(device)
    if used and is_compiler_loaded():
        used = not any_compiled(model.modules())
    with _Linear() if used else nullcontext():
        yield


def is_ready(device: torch.device) -> bool:
    """Whether it works on this device and is faster. The first call compiles, which a recording would not survive."""
    if device not in _ready and not is_recorded(device):
        _ready[device] = _is_gained(device)
    return _ready.get(device, False)


def _is_gained(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) not in _CAPABILITIES:
        return False
    try:
        if works(device):
            return True
        why = "their products are not exact enough"
    except Exception as error:  # noqa: BLE001 - no Triton, no compiler, torch < 2.8: float32 as ever
        why = str(error)
    _log.warning("probes in float32 do not use the tensor cores of %s: %s", device, why)
    return False


class _Linear(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is F.linear and not torch.compiler.is_compiling():
            x, weight, bias = _arguments(*args, **named)
            if supports(x, weight, bias):
                return linear(x, weight, bias)
        return func(*args, **named)


def _arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:  # noqa: A002 - as torch names it
    return input, weight, bias


def supports(x: Any, weight: Any, bias: Any) -> bool:
    """Whether a layer without a graph gains from it, and the kernels support its tensors."""
    given = [x, weight] if bias is None else [x, weight, bias]
    if torch.is_grad_enabled() or not all(type(t) in (Tensor, nn.Parameter) and t.is_cuda for t in given):
        return False
    if any(t.dtype is not torch.float32 or t.data_ptr() % 16 for t in given) or weight.ndim != 2:
        return False
    out, columns = weight.shape
    if out % 16 or columns % 16 or x.numel() < _ROWS * columns or not weight.is_contiguous():
        return False
    reduced = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    return not reduced and not torch.is_autocast_enabled("cuda") and (bias is None or bias.is_contiguous())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` on tensor cores."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    (left, by_row), (right, by_column) = split(rows), split(weight, right=True)
    out = float32_product(left, right)
    grid = out.shape[0], -(-out.shape[1] // _BLOCK)
    _launch(
        "unscale_kernel", grid, out, by_row, by_column, out if bias is None else bias, out.shape[1],
        HAS_BIAS=bias is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out.view(*x.shape[:-1], weight.shape[0])


def float32_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right.T`` of float16 matrices, accumulated and returned in float32 (torch 2.8, on a GPU)."""
    if not left.is_cuda:
        return left.float() @ right.float().t()
    out: Tensor = torch.mm(left, right.t(), out_dtype=torch.float32)
    return out


def split(matrix: Tensor, *, right: bool = False) -> tuple[Tensor, Tensor]:
    """The parts (rows, 3 * columns) of a contiguous matrix in float16, and the scale of every row.

    See :func:`split_by_torch`, which returns the same numbers.
    """
    count, columns = matrix.shape
    parts = torch.empty(count, 3 * columns, dtype=torch.float16, device=matrix.device)
    scales = torch.empty(count, dtype=torch.float32, device=matrix.device)
    _launch("split_kernel", (count,), matrix, parts, scales, columns, RIGHT=right, BLOCK=_BLOCK, num_warps=4)
    return parts, scales


def split_by_torch(matrix: Tensor, *, right: bool = False) -> tuple[Tensor, Tensor]:
    """The reference of :func:`split`: (l, h, h) of the left matrix of a product, (h, l, h) of the right one."""
    exponents = (matrix.abs().amax(1).view(torch.int32) >> 23).clamp(_LOW, _HIGH)
    scaled = matrix * ((_TARGET - exponents) << 23).view(torch.float32)[:, None]
    high = scaled.half()
    low = (scaled - high.float()).half()
    parts = torch.cat([high, low, high] if right else [low, high, high], 1)
    return parts, ((exponents - 14) << 23).view(torch.float32)


def _launch(kernel: str, grid: tuple[int, ...], first: Tensor, *rest: Any, **options: Any) -> None:
    kernels: Any = import_module("deltasam.step.fused._split_kernel")
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():  # Triton launches on the current device
        getattr(kernels, kernel)[grid](first, *rest, **options)


def works(device: torch.device) -> bool:
    """Compares the parts with the reference, and layers with float64: they are far more exact than TF32."""
    generator, n = torch.Generator().manual_seed(0), 2 * _BLOCK + 16
    x, weight, bias = (torch.randn(shape, generator=generator, device="cpu") for shape in ((64, n), (48, n), (48,)))
    x *= 10.0 ** torch.linspace(-30, 30, 64, device="cpu")[:, None]  # far beyond the range of float16
    x[3] = 0
    x, weight, bias = (t.to(device, torch.float32) for t in (x, weight, bias))
    for matrix, right in ((x, False), (weight, True)):
        pairs = zip(split(matrix, right=right), split_by_torch(matrix, right=right), strict=True)
        if not all(torch.equal(found, wanted) for found, wanted in pairs):
            return False
    exact = x.double() @ weight.double().t()
    sizes = x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
    errors = [(linear(x, weight, b).double() - exact - (0 if b is None else b.double())).abs() for b in (None, bias)]
    room = bias.double().abs() * 2.0**-23
    return bool((errors[0] <= _TOLERANCE * sizes).all() and (errors[1] <= _TOLERANCE * sizes + room).all())
