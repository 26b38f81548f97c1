"""Operations of the perturbed pass: they save memory and memory traffic, and round once in half precision.

A ``torch.autograd.Function`` takes longer to launch than an operation of torch, so a GPU that waits for launches gets
the operations of torch instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from deltasam.step.branches import is_recorded

_COMPILING: ContextVar[bool] = ContextVar("compiling", default=False)


@contextmanager
def compiling() -> Iterator[None]:
    """A compiler traces the operations inside: it fuses plain ones, so nothing is written in place or stacked."""
    token = _COMPILING.set(True)
    try:
        yield
    finally:
        _COMPILING.reset(token)


def is_compiling() -> bool:
    """Whether this runs inside :func:`compiling`."""
    return _COMPILING.get()


def add_product(y: Tensor, a: Tensor, d: Tensor) -> Tensor:
    """``y + a d``, batched, written to the memory of y, which must have no other use; d takes no gradient.

    ``torch.baddbmm(y, a, d)`` would copy y first; in place, autograd would keep a history, because the output of a
    layer is a view. If a and d are less precise than y (bfloat16), they are multiplied in their precision.
    """
    if is_compiling():
        return y + torch.bmm(a, d)
    subclass = type(y) is not Tensor or type(a) is not Tensor  # may implement operations in its own way
    if subclass or (y.is_cuda and not is_recorded(y.device)):
        return torch.baddbmm(y, a, d) if d.dtype is y.dtype else y + torch.bmm(a, d)
    made: Tensor = _AddProduct.apply(y, a, d)  # type: ignore[no-untyped-call]
    return made


def add_to_linear(move: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """``move + x matrix^T`` in half precision, rounded once; the move, (G, S, out), must have no other use.

    The order matters. The output of a layer is on the grid of its dtype, so a small move that is added to it is lost
    (a third of it and more in a language model, see benchmarks/arrives_per_instance.py). Here the product, which is
    accumulated in float32, is added to the move before it is rounded, and in the mean all of the move arrives. No
    operation is added.
    """
    flat, rows = move.flatten(0, -2), x.flatten(0, -2)
    if (
        is_compiling()
        or type(move) is not Tensor
        or type(x) is not Tensor
        or (move.is_cuda and not is_recorded(move.device))
    ):
        return torch.addmm(flat, rows, matrix.t()).view(move.shape)
    made: Tensor = _AddToLinear.apply(flat, rows, matrix.to(x.dtype))  # type: ignore[no-untyped-call]
    return made.view(move.shape)


def add_dithered(y: Tensor, move: Tensor) -> Tensor:
    """``y + move`` in half precision for an output that is on the grid already, with the right mean.

    The sum is rounded up with the probability of the part that is cut off. The random bits are a hash of the two
    numbers, so that a repeated pass is the same, and no random stream is used.
    """
    made: Tensor = _AddDithered.apply(y, move.to(y.dtype))  # type: ignore[no-untyped-call]
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


class _AddToLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, move: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(matrix, x if ctx.needs_input_grad[2] else None)
        out = move.new_empty(0)
        out.set_(move)  # type: ignore[call-overload]  # as in _AddProduct
        return out.addmm_(x, matrix.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        (gradient,), (matrix, x) = gradients, ctx.saved_tensors
        of_x = gradient @ matrix if ctx.needs_input_grad[1] else None
        return gradient, of_x, gradient.t() @ x if ctx.needs_input_grad[2] else None


class _AddDithered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, move: Tensor) -> Tensor:
        cut = (1 << (16 if y.dtype is torch.bfloat16 else 13)) - 1  # the bits of float32 that y does not have
        low, high = (t.contiguous().view(torch.int16).int() for t in (move, y))
        bits = low * 0x1E3779B1 + high * 0x05EBCA6B
        bits = ((bits ^ (bits >> 15)) * 0x2C1B3C6D) >> 9
        target = (y.float() + move.float()).view(torch.int32)
        return ((target + (bits & cut)) & ~cut).view(torch.float32).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0]
