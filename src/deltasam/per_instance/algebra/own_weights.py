r"""One matrix per group, :math:`W_g = W + c_g E_g`, and the layer that multiplies with it.

Adding the product with :math:`c_g E_g` to the output of the shared layer takes one more product forward and one more
backward. Multiplying with :math:`W_g` takes none: as many as SAM does. The gradient of all groups with respect to W is
still one product over all rows.

The matrices must not lose the perturbation, which is far smaller than the spacing of bfloat16 or TF32. There they are
rounded stochastically, as SAM's moved weights are: the mean is exactly :math:`W + c_g E_g`, and the noise in an output
is below the rounding of the output itself. In float32 and float64 they are what SAM would write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from deltasam.per_instance.algebra.factors import Dense, Factor, wide_dtype
from deltasam.step.float32 import rounded, rounds_products
from deltasam.step.fused import instances

#: How matrices are rounded: not at all, stochastically to a grid, or "lost": a perturbation would not arrive.
Rounding = Literal["none", "bf16", "tf32", "lost"]


def rounding_of(dtype: torch.dtype, device: torch.device) -> Rounding:
    """How a perturbed matrix must be rounded for products in this dtype."""
    if dtype is torch.float64:
        return "none"
    ready = instances.is_ready(device)
    if dtype is torch.bfloat16:
        return "bf16" if ready else "lost"
    if dtype is not torch.float32:
        return "lost"
    if device.type == "cuda":
        return "none" if not rounds_products(device) else "tf32" if ready else "lost"
    return "lost" if "matmul" in rounded(device) else "none"


def own_values(
    shared: Tensor, terms: Sequence[tuple[Factor, Tensor]], dtype: torch.dtype, rounding: Rounding
) -> Tensor:
    r"""``shared + sum of c_g E_g``, (G, \*shape), for factors that are written out; without a graph.

    Gradients that serve one pass only are overwritten.
    """
    factor, c = terms[0]
    once = len(terms) == 1 and isinstance(factor, Dense) and factor.once
    values = factor.take() if once and isinstance(factor, Dense) else factor.dense()
    if len(terms) > 1:
        wide = wide_dtype(values.dtype)
        moves = [f.dense().to(wide) * _beside(c, f.dense()).to(wide) for f, c in terms]
        values, c = torch.stack(moves).sum(0), torch.ones_like(c)
    shared = shared.detach()
    if rounding in ("bf16", "tf32"):
        out = values if once and values.dtype is dtype and values.is_contiguous() else None
        return instances.own(shared, values, c.to(values.device, torch.float32), rounding, out)
    scale = _beside(c, values).to(dtype)
    if values.dtype is not dtype:
        return torch.addcmul(shared.to(dtype), values.to(dtype), scale)
    return torch.addcmul(shared.to(dtype), values, scale, out=values if once else None)


def own_product(x: Tensor, matrix: Tensor, bias: Tensor | None, own: Tensor, shift: Tensor | None) -> Tensor:
    """``x own^T + shift``, (G, S, out), whose gradient is that of ``x matrix^T + bias``.

    Args:
        x: Inputs, (G, S, in).
        matrix: W, (out, in), for its gradient only, in any dtype.
        bias: For its gradient only, in any dtype.
        own: The matrices of the groups, (G, out, in).
        shift: The biases of the groups, (G or 1, 1, out).
    """
    made: Tensor = _OwnProduct.apply(x, matrix, bias, own, shift)  # type: ignore[no-untyped-call]
    return made


class _OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, own: Tensor, shift: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, own if ctx.needs_input_grad[0] else None)
        ctx.dtypes = matrix.dtype, None if bias is None else bias.dtype
        return torch.bmm(x, own.mT) if shift is None else torch.baddbmm(shift, x, own.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (gradient,), (x, own) = gradients, ctx.saved_tensors
        of_x = of_matrix = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = torch.bmm(gradient, own)
        if ctx.needs_input_grad[1]:
            of_matrix = (gradient.flatten(0, 1).t() @ x.flatten(0, 1)).to(ctx.dtypes[0])
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum((0, 1), dtype=ctx.dtypes[1])
        return of_x, of_matrix, of_bias, None, None


def _beside(c: Tensor, values: Tensor) -> Tensor:
    """The coefficients (G,) as (G, 1, ...), where the values are."""
    return c.to(values.device).view(-1, *(1,) * (values.ndim - 1))
