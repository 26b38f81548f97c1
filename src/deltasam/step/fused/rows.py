"""Biases and layer norms of perturbed layers in one pass over memory, for steps that are recorded.

torch adds a vector to the rows of a matrix at a third of the speed of memory, and multiplies with one vector per
instance likewise. In a recorded step, which waits for memory and not for the host, that is a good part of what exact
per-instance perturbation costs beyond SAM. Kernels are compiled in ordinary steps, see :func:`warm`: a recording would
not survive it.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deltasam.step.branches import is_recorded

_MOST = 8192  # columns of a norm: a row is one block
_ROWS, _COLUMNS = 8, 512  # of a block of bias_kernel
_DTYPES = (torch.float32, torch.bfloat16)
_log = logging.getLogger(__name__)
_warm: dict[tuple[Any, ...], bool] = {}


def warm(kind: str, like: Tensor, vector: Tensor) -> None:
    """Compiles and checks a kernel for tensors such as these, in an ordinary step; one that fails is not used."""
    key = _key(kind, like, vector)
    if key not in _warm and like.is_cuda and not is_recorded(like.device):
        try:
            _warm[key] = works(kind, like, vector)
        except Exception as why:  # noqa: BLE001 - no Triton, no compiler, an unknown device: torch's kernels
            _log.info("the kernel %r cannot be used on %s: %s", kind, like.device, why)
            _warm[key] = False


def is_warm(kind: str, like: Tensor, vector: Tensor) -> bool:
    """Whether the kernel is compiled for tensors such as these, and right."""
    plain = type(like) is Tensor and like.is_contiguous() and vector.is_contiguous()
    aligned = like.data_ptr() % 16 == 0 and vector.data_ptr() % 16 == 0
    return plain and aligned and _warm.get(_key(kind, like, vector), False)


def _key(kind: str, like: Tensor, vector: Tensor) -> tuple[Any, ...]:
    return kind, like.device, like.dtype, vector.dtype, like.shape[-1]


def add_bias_(out: Tensor, bias: Tensor) -> Tensor:
    """``out += bias`` for the last dimension of ``out``, in place; rounded once."""
    rows, columns = out.numel() // out.shape[-1], out.shape[-1]
    grid = -(-rows // _ROWS), -(-columns // _COLUMNS)
    _launch("bias_kernel", grid, out, bias, rows, columns, ROWS=_ROWS, BLOCK=_COLUMNS, num_warps=4)
    return out


def norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``layer_norm(x) * scale + shift``, x (N, S, H), scale and shift (N, 1, H); also mean and 1 / std, (N, S, 1)."""
    out = torch.empty_like(x)
    means, factors = (torch.empty(*x.shape[:-1], 1, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(
        "norm_kernel", (x.shape[0] * x.shape[1],), x, scale, shift, out, means, factors, x.shape[1], x.shape[2], eps,
        BLOCK=_block(x.shape[2]), num_warps=4,
    )  # fmt: skip
    return out, means, factors


def norm_backward(gradient: Tensor, x: Tensor, scale: Tensor, means: Tensor, factors: Tensor) -> Tensor:
    """The gradient of :func:`norm` by x."""
    out = torch.empty_like(x)
    _launch(
        "norm_backward_kernel", (x.shape[0] * x.shape[1],), gradient, x, scale, means, factors, out, x.shape[1],
        x.shape[2], BLOCK=_block(x.shape[2]), num_warps=4,
    )  # fmt: skip
    return out


def _block(columns: int) -> int:
    return 1 << (columns - 1).bit_length()


def _launch(kernel: str, grid: tuple[int, ...], first: Tensor, *rest: Any, **options: Any) -> None:
    kernels: Any = import_module("deltasam.step.fused._rows_kernel")
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():  # Triton launches on the current device
        getattr(kernels, kernel)[grid](first, *rest, **options)


def works(kind: str, like: Tensor, vector: Tensor) -> bool:
    """Compares a kernel with torch on numbers of these dtypes and this width."""
    device, columns = like.device, like.shape[-1]
    if like.dtype not in _DTYPES or vector.dtype not in _DTYPES:
        return False
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(3, 5, columns, generator=generator, device="cpu").to(device) for _ in range(2))
    if kind == "bias":
        out, bias = x.to(like.dtype), gradient[0, 0].to(vector.dtype)
        wanted = (out.float() + bias.float()).to(out.dtype)
        return torch.equal(add_bias_(out.clone(), bias), wanted)
    if columns > _MOST or like.dtype is not torch.float32 or vector.dtype is not torch.float32:
        return False
    scale, shift = (torch.randn(3, 1, columns, generator=generator, device="cpu").to(device) for _ in range(2))
    x.requires_grad_()
    wanted = torch.layer_norm(x, (columns,), None, None, 1e-5) * scale + shift
    (of_x,) = torch.autograd.grad(wanted, x, gradient)
    found, means, factors = norm(x.detach(), scale, shift, 1e-5)
    mine = norm_backward(gradient, x.detach(), scale, means, factors)
    return all(bool(((a - b).abs() <= 1e-4 * (1 + b.abs())).all()) for a, b in ((found, wanted), (mine, of_x)))
