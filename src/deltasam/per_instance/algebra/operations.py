"""Two operations of the perturbed pass that save memory and memory traffic compared with plain autograd.

A ``torch.autograd.Function`` takes longer to launch than an operation of torch, so a GPU that waits for launches gets
the operations of torch instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltasam.step.branches import is_recorded

_LARGE = 2**21  # elements; from here on memory matters more than the number of kernels


def add_product(y: Tensor, a: Tensor, d: Tensor) -> Tensor:
    """``y + a d``, batched, written to the memory of y, which must have no other use; d takes no gradient.

    ``torch.baddbmm(y, a, d)`` would copy y first; in place, autograd would keep a history, because the output of a
    layer is a view. If a and d are less precise than y (bfloat16), they are multiplied in their precision.
    """
    subclass = type(y) is not Tensor or type(a) is not Tensor  # may implement operations in its own way
    if subclass or (y.is_cuda and not is_recorded(y.device)):
        return torch.baddbmm(y, a, d) if d.dtype is y.dtype else y + torch.bmm(a, d)
    made: Tensor = _AddProduct.apply(y, a, d)  # type: ignore[no-untyped-call]
    return made


def scaled_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """``layer_norm(x) * scale + shift`` over the last dimension of x (N, S, H); scale and shift are (N, 1, H).

    It saves x and two numbers per row for the backward, as torch's layer norm does; the normalised x is recomputed.
    """
    if x.is_cuda and x.numel() < _LARGE:
        return torch.addcmul(shift, torch.layer_norm(x, x.shape[-1:], None, None, eps), scale)
    made: Tensor = _ScaledNorm.apply(x, scale, shift, eps)  # type: ignore[no-untyped-call]
    return made


class _AddProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, a: Tensor, d: Tensor) -> Tensor:
        ctx.save_for_backward(d)
        out = y.new_empty(0)
        out.set_(y)  # type: ignore[call-overload]  # the same memory, but no view of y to autograd
        if d.dtype is y.dtype:
            out.baddbmm_(a, d)
        else:
            out.add_(torch.bmm(a, d))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (gradient,), (d,) = gradients, ctx.saved_tensors
        return gradient, torch.bmm(gradient.to(d.dtype), d.mT) if ctx.needs_input_grad[1] else None, None


class _ScaledNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        normal, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
        ctx.save_for_backward(x, scale, mean, rstd)
        return torch.addcmul(shift, normal, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient,), (x, scale, mean, rstd) = gradients, ctx.saved_tensors
        of_x = of_scale = of_shift = None
        if ctx.needs_input_grad[1]:
            normal = torch.sub(x, mean).mul_(rstd)
            of_scale = normal.mul_(gradient).sum(1, keepdim=True)
        if ctx.needs_input_grad[2]:
            of_shift = gradient.sum(1, keepdim=True)
        if ctx.needs_input_grad[0]:
            of_x, _, _ = torch.ops.aten.native_layer_norm_backward(
                gradient * scale, x, x.shape[-1:], mean, rstd, None, None, [True, False, False]
            )
        return of_x, of_scale, of_shift, None
