"""A linear layer and a layer norm at the weights of every instance.

Each has two forms. An eager step on a GPU waits for the host: there it is composed of few operations of torch, whose
graph is built and run in C++. A captured step, and a CPU, wait for memory: there it is one ``autograd.Function``. The
factors of a perturbation have no gradient, and only the weights that all instances share need one, so its backward has
fewer operations than autograd's, and sums are written into the result of the product before them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltasam.per_instance.algebra.factors import LowRank, Products
from deltasam.step.fused import rows as fused_rows
from deltasam.step.randomness import is_observed


def perturbed_linear(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    factor: LowRank,
    c: Tensor,
    products: Products,
    *,
    is_eager: bool,
) -> Tensor:
    r"""The layer ``x matrix^T + bias`` with perturbed weights, :math:`x W^\top + b + c\,(x X^\top + 1)\, D`.

    The order matters in half precision. The output of a layer is on the grid of its dtype, so a small move that is
    added to it is lost (a third of it and more in a language model, see benchmarks/arrives_per_instance.py). There the
    product, which is accumulated in float32, is added to the move before it is rounded, and in the mean all of the
    move arrives.

    Args:
        x: Inputs, (G, S, in).
        matrix: The weight, (out, in).
        bias: The bias, (out,).
        factor: X and D, and whether the bias is perturbed, too (the 1 in the equation).
        c: The coefficients, (G,).
        products: Computes c (x X^T + 1), once for layers with the same input.
        is_eager: Whether the host launches every operation while a GPU waits.
    """
    if not is_eager:
        matrix = matrix.to(x.dtype)  # autocast does not look into a Function
        made: Tensor = _Linear.apply(x, matrix, bias, factor, c, products)  # type: ignore[no-untyped-call]
        return made
    d = factor.d
    if bias is not None and x.dtype is torch.bfloat16 and is_observed():
        fused_rows.warm("bias", d, bias)  # compiles, which the recording of the next step would not survive
    if x.dtype is torch.float32 or x.dtype is torch.float64:
        product = products(x, factor.x, c, factor.bias, d.dtype, factor.scaled)
        y = F.linear(x, matrix, bias)
        return torch.baddbmm(y, product, d) if d.dtype is y.dtype else y + torch.bmm(product, d)
    product = products(x, factor.x, c, factor.bias, x.dtype, factor.scaled)
    move = torch.bmm(product, d if d.dtype is x.dtype else d.to(x.dtype))
    shape = move.shape
    y = torch.addmm(move.view(-1, shape[2]), x.reshape(-1, x.shape[2]), matrix.t())
    return (y if bias is None else y.add_(bias)).view(shape)  # in place: the bias needs no cast of its own


def perturbed_norm(
    x: Tensor, weight: Tensor, bias: Tensor, moves: tuple[Tensor, Tensor], eps: float, *, is_eager: bool
) -> Tensor:
    """``layer_norm(x) * (weight + move) + bias + move`` over the last dimension of x (N, S, H).

    The moves, (N, 1, H) each, are constants, so the gradients of weight and bias are those of an ordinary layer norm.
    Both forms save x and two numbers per row, as torch's layer norm does.
    """
    shape, (scale, shift) = x.shape[-1:], moves
    if is_eager:
        if is_observed():
            fused_rows.warm("norm", x, weight)
        normal = torch.layer_norm(x, shape, None, None, eps)
        return torch.addcmul(shift, normal, scale) + torch.layer_norm(x, shape, weight, bias, eps)
    made: Tensor = _Norm.apply(x, weight, bias, weight + scale, bias + shift, eps)  # type: ignore[no-untyped-call]
    return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, factor: LowRank, c: Tensor, products: Products
    ) -> Tensor:
        of_x, of_matrix, of_bias = ctx.needs_input_grad[:3]
        ctx.save_for_backward(x if of_matrix else None, matrix if of_x else None)
        d, is_half = factor.d, x.dtype in (torch.bfloat16, torch.float16)
        ctx.rest = factor, products.scale(c, x.dtype), bias.dtype if of_bias and bias is not None else None
        if is_half:
            product = products(x, factor.x, c, factor.bias, x.dtype)
            out = torch.bmm(product, d if d.dtype is x.dtype else d.to(x.dtype))
            out.view(-1, out.shape[2]).addmm_(x.reshape(-1, x.shape[2]), matrix.t())
            if bias is not None and fused_rows.is_warm("bias", out, bias):
                return fused_rows.add_bias_(out, bias)
            return out if bias is None else out.add_(bias)
        y = F.linear(x, matrix, bias)
        out = y.new_empty(0)
        out.set_(y)  # type: ignore[call-overload]  # the same memory, but no view, which a model could not change
        if d.dtype is torch.bfloat16:  # kept in half the memory, and multiplied so
            return out.add_(torch.bmm(products(x, factor.x, c, factor.bias, d.dtype), d))
        return out.baddbmm_(products(x, factor.x, c, factor.bias, x.dtype), d)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, matrix) = gradients, ctx.saved_tensors
        factor, scale, bias_dtype = ctx.rest
        rows = gradient.reshape(-1, gradient.shape[2])
        of_x = of_matrix = of_bias = None
        if matrix is not None:
            recorded, d = factor.x, factor.d
            a = torch.bmm(gradient if gradient.dtype is d.dtype else gradient.to(d.dtype), d.mT)
            a = a.mul_(scale) if a.dtype is scale.dtype else (a * scale).to(gradient.dtype)
            of_x = torch.mm(rows, matrix).view(*gradient.shape[:2], -1)
            of_x.baddbmm_(a, recorded if recorded.dtype is a.dtype else recorded.to(a.dtype))
        if x is not None:
            of_matrix = torch.mm(rows.t(), x.reshape(-1, x.shape[2]))
        if bias_dtype is not None:
            of_bias = rows.sum(0, dtype=bias_dtype)
        return of_x, of_matrix, of_bias, None, None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        of_rows = x.ndim == 3 and scale.shape == shift.shape == (x.shape[0], 1, x.shape[2])
        ctx.scale, ctx.is_fused = scale, of_rows and fused_rows.is_warm("norm", x, scale)
        if ctx.is_fused:
            out, mean, rstd = fused_rows.norm(x, scale, shift, eps)
        else:
            normal, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
            out = torch.addcmul(shift, normal, scale)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, mean, rstd, weight, bias) = gradients, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        found: list[Tensor | None] = [None, None, None]
        backward = torch.ops.aten.native_layer_norm_backward
        if of_x and ctx.is_fused and fused_rows.is_warm("norm", gradient, ctx.scale):
            found[0] = fused_rows.norm_backward(gradient, x, ctx.scale, mean, rstd)
        elif of_x:
            found[0] = backward(gradient * ctx.scale, x, x.shape[-1:], mean, rstd, None, None, [True, False, False])[0]
        if of_weight or of_bias:
            mask = [False, of_weight, of_bias]
            found[1:] = backward(gradient, x, x.shape[-1:], mean, rstd, weight, bias, mask)[1:]
        return (*found, None, None, None)
