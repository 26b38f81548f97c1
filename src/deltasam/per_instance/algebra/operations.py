"""Two operations of the perturbed pass that autograd would spend more memory and more trips through it on.

A function of Python's takes longer to start than one of torch's own, so a GPU that waits for launches gets the latter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltasam.step.branches import is_recorded

_LARGE = 2**21  # elements; from here on memory matters more than the number of kernels


def add_product(y: Tensor, a: Tensor, d: Tensor) -> Tensor:
    """``y + a d``, batched, in the memory of y, which nobody else may need; d takes no gradient.

    Written ``torch.baddbmm(y, a, d)`` it would copy y first, and in place autograd would keep a history for the view
    that the output of a layer is. Where a and d have fewer digits than y (bfloat16), they are multiplied in those.
    """
    subclass = type(y) is not Tensor or type(a) is not Tensor  # has its own way to carry out an operation
    if subclass or (y.is_cuda and not is_recorded(y.device)):
        return torch.baddbmm(y, a, d) if d.dtype is y.dtype else y + torch.bmm(a, d)
    made: Tensor = _AddProduct.apply(y, a, d)  # type: ignore[no-untyped-call]
    return made


def scaled_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """``layer_norm(x) * scale + shift`` over the last dimension of x (N, S, H); scale and shift are (N, 1, H).

    Of the forward pass it keeps x and two numbers per row, as torch's own layer norm does, and not the normalised x,
    too: that is made again where it is needed.
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
