"""Per-instance gradients of one parameter, kept in the cheapest exact form, and the algebra between the forms.

For a weight that maps inputs ``x`` (S rows) to outputs with gradients ``d`` (S rows), the gradient of one instance is
``d^T x``: rank at most S, never written out. Three forms are enough for every layer: :class:`LowRank`, :class:`Rows`
(a table looked up by ids) and :class:`Dense` (everything that is small). All tensors carry the groups in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LowRank:
    """``d^T x`` (``transposed``: ``x^T d``), the gradient of a weight used as a matrix.

    Args:
        x: Inputs of the layer, ``(G, S, in)``.
        d: Gradients of the outputs, ``(G, S, out)``.
        bias: Whether the bias of the layer is folded in, as one more input that is always 1.
        transposed: Whether the weight is stored as ``(in, out)``, as GPT-2's ``Conv1D`` does.
    """

    x: Tensor
    d: Tensor
    bias: bool
    transposed: bool

    def dense(self) -> Tensor:
        left, right = (self.x, self.d) if self.transposed else (self.d, self.x)
        return left.transpose(1, 2) @ right


@dataclass(frozen=True, eq=False)
class Rows:
    """``onehot(ids)^T d``, the gradient of a table looked up by ids ``(G, S)``; ``d`` is ``(G, S, out)``."""

    ids: Tensor
    d: Tensor
    rows: int

    def dense(self) -> Tensor:
        table = self.d.new_zeros(self.d.shape[0], self.rows, self.d.shape[2])
        return table.scatter_add_(1, self.ids.unsqueeze(2).expand_as(self.d), self.d)


@dataclass(frozen=True, eq=False)
class Dense:
    """The gradients themselves, ``(G, *shape of the parameter)``; small ones are columns of a ``pack`` (G, all)."""

    value: Tensor
    pack: Tensor | None = None
    start: int = 0

    def dense(self) -> Tensor:
        return self.value


Factor = LowRank | Rows | Dense


def dot(a: Factor, b: Factor) -> Tensor:
    """Inner product of two gradients of the same parameter, per group, ``(G,)``, in float32 at least."""
    match a, b:
        case LowRank(), LowRank() if a.transposed == b.transposed:
            inputs = _gram(a.x, b.x)
            return _sum((inputs + 1 if a.bias and b.bias else inputs) * _gram(a.d, b.d))
        case Rows(), Rows():
            same = a.ids.unsqueeze(2) == b.ids.unsqueeze(1)
            return _sum(_gram(a.d, b.d).masked_fill(~same, 0))
        case Rows(), LowRank(transposed=False):
            return _sum(_columns(b.d, a.ids) * _gram(b.x, a.d))
        case Rows(), Dense():
            picked = b.value.gather(1, a.ids.unsqueeze(2).expand(*a.ids.shape, b.value.shape[2]))
            return _sum(picked * a.d)
        case LowRank(transposed=False), Rows():
            return dot(b, a)
        case Dense(), Rows():
            return dot(b, a)
        case _:
            return _sum(a.dense() * b.dense())


def sum_of_squares(factors: Sequence[Factor]) -> list[Tensor]:
    """Terms (G,) that add up to the squared norms of factors of different parameters, in few large operations.

    What is packed side by side is squared at once. Gram matrices of one shape are written next to each other, those of
    the inputs once for all layers that share one (query, key, value), so that two operations are left for them all.
    """
    terms = [_sum(f.value.square()) for f in factors if isinstance(f, Dense) and f.pack is None]
    packs = {id(f.pack): f.pack for f in factors if isinstance(f, Dense) and f.pack is not None}
    terms += [_sum(pack.square()) for pack in packs.values()]
    terms += [dot(f, f) for f in factors if isinstance(f, Rows)]
    shapes: dict[Any, dict[tuple[int, bool], list[LowRank]]] = {}
    for f in factors:
        if isinstance(f, LowRank):
            kind = (f.d.device, f.d.dtype, f.d.shape[:2])
            shapes.setdefault(kind, {}).setdefault((id(f.x), f.bias), []).append(f)
    for shared in shapes.values():
        terms.append(_stacked_grams([*shared.values()]))
    return terms


def _stacked_grams(shared: list[list[LowRank]]) -> Tensor:
    """Squared norms (G,) of low-rank factors of one shape; each inner list shares its input and bias."""
    shared = sorted(shared, key=lambda members: not members[0].bias)
    first = shared[0][0].d
    groups, positions = first.shape[:2]
    dtype = torch.float32 if first.dtype is torch.float16 else first.dtype
    inputs, outputs = first.new_empty(2, len(shared), groups, positions, positions, dtype=dtype).unbind(0)
    for members, left, right in zip(shared, inputs.unbind(0), outputs.unbind(0), strict=True):
        x = members[0].x.to(dtype)
        torch.bmm(x, x.transpose(1, 2), out=left)
        for number, factor in enumerate(members):
            d = factor.d.to(dtype)
            torch.baddbmm(right, d, d.transpose(1, 2), beta=min(number, 1), out=right)
    biased = sum(members[0].bias for members in shared)
    if biased:
        inputs[:biased] += 1
    return inputs.mul_(outputs).sum((0, 2, 3), dtype=wide_dtype(dtype))


def add_linear(y: Tensor, x: Tensor, factor: Factor, c: Tensor, products: Products, transposed: bool) -> Tensor:
    """``y + c x E^T`` (``transposed``: ``y + c x E``), for the perturbation ``c E`` of a weight used as a matrix.

    x is ``(G, S, in)``, y is ``(G, S, out)``.
    """
    match factor:
        case LowRank() if factor.transposed == transposed:
            product, d = products(x, factor.x, c, factor.bias), factor.d
            return torch.baddbmm(y, product, d if d.dtype == y.dtype else d.to(y.dtype))
        case Rows() if not transposed:
            along = products(x, factor.d, c, False)
            return y.scatter_add(2, factor.ids.unsqueeze(1).expand(-1, along.shape[1], -1), along.to(y.dtype))
        case _:
            matrix = factor.dense().flatten(2)
            matrix = (matrix * c.view(-1, 1, 1).to(matrix.dtype)).to(y.dtype)
            return torch.baddbmm(y, x.to(y.dtype), matrix if transposed else matrix.transpose(1, 2))


def add_rows(y: Tensor, ids: Tensor, factor: Factor, c: Tensor) -> Tensor:
    """``y + c E[ids]`` for the perturbation ``c E`` of a table; ids is ``(G, S)``, y is ``(G, S, out)``."""
    scale = c.view(-1, 1, 1).to(y.dtype)
    match factor:
        case Rows():
            same = (ids.unsqueeze(2) == factor.ids.unsqueeze(1)).to(y.dtype) * scale
            return torch.baddbmm(y, same, factor.d.to(y.dtype))
        case LowRank(transposed=False):
            picked = _columns(factor.d, ids).transpose(1, 2).to(y.dtype) * scale
            return torch.baddbmm(y, picked, factor.x.to(y.dtype))
        case _:
            dense = factor.dense()
            return y + scale * dense.gather(1, ids.unsqueeze(2).expand(*ids.shape, dense.shape[2])).to(y.dtype)


class Products:
    """``c (x X^T + 1)``, computed once while the same input goes through several layers (query, key, value)."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._operands: tuple[Tensor, ...] = ()  # alive, so that no other tensor takes their identity
        self._product = torch.empty(0)
        self._scales: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, x: Tensor, recorded: Tensor, c: Tensor, bias: bool) -> Tensor:
        key = (id(x), id(recorded), id(c), bias)
        if key != self._key:
            scale = self.scale(c, x.dtype)
            product = torch.bmm(x, (recorded if recorded.dtype == x.dtype else recorded.to(x.dtype)).transpose(1, 2))
            self._product = torch.addcmul(scale, product, scale) if bias else product * scale
            self._key, self._operands = key, (x, recorded, c)
        return self._product

    def scale(self, c: Tensor, dtype: torch.dtype) -> Tensor:
        """The coefficients as (G, 1, 1)."""
        key = (id(c), dtype)
        if key not in self._scales:
            self._scales[key] = c.to(dtype).view(-1, 1, 1)
        return self._scales[key]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32 at least."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _gram(a: Tensor, b: Tensor) -> Tensor:
    """``a b^T`` of every group. Float16 goes to float32: products of small gradients leave its range."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    dtype = torch.float32 if dtype is torch.float16 else dtype
    return torch.bmm(a.to(dtype), b.to(dtype).transpose(1, 2))


def _columns(d: Tensor, ids: Tensor) -> Tensor:
    """Columns of ``d`` (G, S, V) named by ``ids`` (G, T): ``(G, S, T)``."""
    return d.gather(2, ids.unsqueeze(1).expand(-1, d.shape[1], -1))


def _sum(products: Tensor) -> Tensor:
    return products.reshape(products.shape[0], -1).sum(1, dtype=wide_dtype(products.dtype))
