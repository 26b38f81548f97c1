"""Per-instance gradients of one parameter in the cheapest exact form, and the algebra between the forms.

For a weight that maps inputs ``x`` (S rows) to outputs with gradients ``d`` (S rows), the gradient of one instance is
``d^T x``: rank at most S, never written out. Three forms are enough for every layer: :class:`LowRank`, :class:`Rows`
(a table looked up by ids) and :class:`Dense` (small parameters; vectors are :class:`Packed` side by side). The first
dimension of every tensor is the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltasam.per_instance.algebra.operations import add_product, is_compiling
from deltasam.step.branches import is_recorded


@dataclass(eq=False)
class Stack:
    """Inputs of layers of one shape side by side, ``(layers, G, S, in)``: one operation serves them all.

    ``once``: the next perturbed pass is the last one, and multiplies them with its coefficients.
    """

    values: Tensor
    once: bool = False
    scaled: tuple[Tensor, ...] | None = None  # c X^T of every layer, from then on

    def scale(self, c: Tensor) -> None:
        """Multiplies the inputs with the coefficients (G,), in place."""
        assert self.scaled is None, "these gradients were for one pass"
        values = self.values.mul_(c.to(self.values.device).view(-1, 1, 1))
        self.scaled = values.mT.unbind(0)


@dataclass(frozen=True, eq=False)
class LowRank:
    """``d^T x`` (``transposed``: ``x^T d``), the gradient of a weight that is used as a matrix.

    Args:
        x: Inputs of the layer, ``(G, S, in)``.
        d: Gradients of the outputs, ``(G, S, out)``.
        bias: Whether the bias of the layer is folded in, as one more input that is always 1.
        transposed: Whether the weight is stored as ``(in, out)``, as GPT-2's ``Conv1D`` does.
        stack: What x is part ``place`` of, in eager steps on a GPU. Only for the only use of a weight.
    """

    x: Tensor
    d: Tensor
    bias: bool
    transposed: bool
    stack: Stack | None = None
    place: int = 0

    @property
    def scaled(self) -> Tensor | None:
        """The transposed inputs times c, (G, in, S), if x was multiplied with the coefficients already."""
        return None if self.stack is None or self.stack.scaled is None else self.stack.scaled[self.place]

    def dense(self) -> Tensor:
        """The gradients written out, ``(G, *shape of the parameter)``."""
        x, d = self.x, self.d.to(self.x.dtype)  # d may be kept in lower precision
        left, right = (x, d) if self.transposed else (d, x)
        return left.transpose(1, 2) @ right


@dataclass(frozen=True, eq=False)
class Rows:
    """``onehot(ids)^T d``, the gradient of a table looked up by ids ``(G, S)``; ``d`` is ``(G, S, out)``."""

    ids: Tensor
    d: Tensor
    rows: int

    @property
    def is_short(self) -> bool:
        """Whether the table has no more rows than it is looked up."""
        return self.rows <= self.ids.shape[1]

    def dense(self) -> Tensor:
        """The gradients written out, ``(G, rows, out)``."""
        if self.is_short and self.d.is_cuda:  # in a fixed order; scatter_add sums in any
            numbers = torch.arange(self.rows, device=self.ids.device).view(1, -1, 1)
            return torch.bmm((self.ids.unsqueeze(1) == numbers).to(self.d.dtype), self.d)
        table = self.d.new_zeros(self.d.shape[0], self.rows, self.d.shape[2])
        return table.scatter_add_(1, self.ids.unsqueeze(2).expand_as(self.d), self.d)


@dataclass(eq=False)
class Dense:
    """The gradients themselves, ``(G, *shape of the parameter)``.

    Args:
        value: The gradients.
        squares: Their squared norms (G,), if they are known.
        own: Whether all uses of the parameter can multiply with one matrix per group.
        once: Whether the next perturbed pass is the last one, and may overwrite the gradients.
    """

    value: Tensor
    squares: Tensor | None = None
    own: bool = False
    once: bool = False

    def dense(self) -> Tensor:
        """The gradients."""
        return self.value

    def take(self) -> Tensor:
        """The gradients, to be overwritten: this factor has none any more."""
        value = self.value
        del self.value
        return value


@dataclass(frozen=True, eq=False)
class Packed:
    """The gradients of a vector: columns of a ``pack`` (G, columns of many vectors), which serves them all at once."""

    pack: Tensor
    start: int
    shape: torch.Size  # of the parameter

    def dense(self) -> Tensor:
        """The gradients, a view of the pack, ``(G, *shape of the parameter)``."""
        stop = self.start + self.shape.numel()
        return self.pack[:, self.start : stop].view(-1, *self.shape)


Factor = LowRank | Rows | Dense | Packed
_LARGE = 2**22  # elements; stacking factors larger than this costs more than it saves


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
        case Dense(), Dense() if a is b:
            return squares_of(a.value) if a.squares is None else a.squares
        case _:
            return _sum(a.dense() * b.dense())


def sum_of_squares(factors: Sequence[Factor]) -> list[Tensor]:
    """Terms (G,) whose sum is the squared norm over factors of different parameters, in few large operations.

    A pack is squared at once. Inputs of one shape are stacked for their Gram matrices, and so are gradients.
    """
    terms = [dot(f, f) for f in factors if isinstance(f, Dense)]
    packs = {id(f.pack): f.pack for f in factors if isinstance(f, Packed)}
    terms += [_sum(pack.square()) for pack in packs.values()]
    terms += [dot(f, f) for f in factors if isinstance(f, Rows)]
    shapes: dict[Any, list[LowRank]] = {}
    for f in factors:
        if isinstance(f, LowRank):
            shapes.setdefault((f.d.device, f.d.dtype, f.d.shape, f.x.shape, f.bias), []).append(f)
    for members in shapes.values():
        terms += _low_rank_norms(members)
    return terms


def squares_of(value: Tensor) -> Tensor:
    """The squared norms (G,) of gradients (G, ...), read once, in float32 at least."""
    norms: Tensor = torch.linalg.vector_norm(value.flatten(1), dim=1, dtype=wide_dtype(value.dtype))
    return norms.square()


def _low_rank_norms(members: list[LowRank]) -> list[Tensor]:
    """Squared norms (G,) of low-rank factors of one shape: sums of (X X^T + 1) * (D D^T), in a few terms."""
    first = members[0]
    dtype = torch.float32 if first.d.dtype is torch.float16 else first.d.dtype
    size = first.x.numel() + first.d.numel()
    wait = waits_for_host(first.d.device)  # launches cost more than copies
    limit = 4 * stack_limit(first.d.device) if wait else stack_limit(first.d.device)
    several = max(1, limit // max(1, size)) if size < _LARGE or wait else 1
    terms: list[Tensor] = []
    known: dict[int, Tensor] = {}
    for start in range(0, len(members), several):
        some = members[start : start + several]
        inputs = {id(f.x): f.x for f in some if id(f.x) not in known}  # query, key and value share one
        if first.x.dtype is not dtype:
            inputs = {name: x.to(dtype) for name, x in inputs.items()}
        known = {name: gram for name, gram in known.items() if name in {id(f.x) for f in some}}
        known.update(zip(inputs, _grams([*inputs.values()]), strict=True))
        ours = [known[id(f.x)] for f in some]
        gram = _grams([f.d if f.d.dtype is dtype else f.d.to(dtype) for f in some])
        product = torch.stack(ours) if len(ours) > 1 else ours[0].unsqueeze(0)
        product = torch.addcmul(gram, product, gram) if first.bias else product * gram
        terms.append(product.sum((0, 2, 3), dtype=wide_dtype(dtype)))
    return terms


def _grams(tensors: list[Tensor]) -> Tensor:
    """``t t^T`` of every group, (len, G, S, S)."""
    if not tensors:
        return torch.empty(0)
    rows = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    grams = torch.bmm(rows, rows.transpose(1, 2))
    return grams.view(len(tensors), -1, *grams.shape[1:])


def waits_for_host(device: torch.device) -> bool:
    """Whether a GPU waits while the host launches every operation: an eager step."""
    return device.type == "cuda" and not is_compiling() and not is_recorded(device)


def stack_limit(device: torch.device) -> int:
    """How many elements to stack at most: on a GPU launches cost most, on the CPU copies, for a compiler both."""
    if is_compiling():
        return 0
    return 2**24 if device.type == "cuda" else 2**14


def rest_of(factor: Factor, c: Tensor) -> Tensor:
    """The coefficients, (G,), of a factor written out: ones if its inputs were multiplied with them already."""
    return torch.ones_like(c) if type(factor) is LowRank and factor.scaled is not None else c


def add_linear(y: Tensor, x: Tensor, factor: Factor, c: Tensor, products: Products, transposed: bool) -> Tensor:
    """``y + c x E^T`` (``transposed``: ``y + c x E``), for the perturbation ``c E`` of a weight used as a matrix.

    x is ``(G, S, in)``. y is ``(G, S, out)``, fresh from the layer: the sum may be written to its memory.
    """
    match factor:
        case LowRank() if factor.transposed == transposed:
            d = factor.d
            narrow = d.dtype is torch.bfloat16 and y.dtype in (torch.float32, torch.float64)
            product = products(x, factor.x, c, factor.bias, d.dtype if narrow else y.dtype, factor.scaled)
            return add_product(y, product, d if narrow or d.dtype == y.dtype else d.to(y.dtype))
        case Rows() if not transposed:
            along = products(x, factor.d, c, False, x.dtype)
            return y.scatter_add(2, factor.ids.unsqueeze(1).expand(-1, along.shape[1], -1), along.to(y.dtype))
        case _:
            matrix = factor.dense().flatten(2)
            matrix = (matrix * rest_of(factor, c).view(-1, 1, 1).to(matrix.dtype)).to(y.dtype)
            return torch.baddbmm(y, x.to(y.dtype), matrix if transposed else matrix.transpose(1, 2))


def linear_move(x: Tensor, factor: Factor, c: Tensor, products: Products, transposed: bool, out: int) -> Tensor:
    """``c x E^T`` (``transposed``: ``c x E``) in the dtype of x, (G, S, out); see :func:`add_linear`."""
    match factor:
        case LowRank() if factor.transposed == transposed:
            product = products(x, factor.x, c, factor.bias, x.dtype, factor.scaled)
            return torch.bmm(product, factor.d.to(x.dtype))
        case Rows() if not transposed:
            return add_linear(x.new_zeros(*x.shape[:2], out), x, factor, c, products, transposed)
        case _:
            matrix = factor.dense().flatten(2)
            matrix = (matrix * rest_of(factor, c).view(-1, 1, 1).to(matrix.dtype)).to(x.dtype)
            return torch.bmm(x, matrix if transposed else matrix.transpose(1, 2))


def add_rows(y: Tensor, ids: Tensor, factor: Factor, c: Tensor) -> Tensor:
    """``y + c E[ids]`` for the perturbation ``c E`` of a table; ids is ``(G, S)``, y is ``(G, S, out)``."""
    scale = rest_of(factor, c).view(-1, 1, 1).to(y.dtype)
    match factor:
        case Rows():
            same = (ids.unsqueeze(2) == factor.ids.unsqueeze(1)) * scale
            return torch.baddbmm(y, same, factor.d.to(y.dtype))
        case LowRank(transposed=False):
            picked = _columns(factor.d, ids).transpose(1, 2).to(y.dtype) * scale
            return torch.baddbmm(y, picked, factor.x.to(y.dtype))
        case _:
            dense = factor.dense()
            return y + scale * dense.gather(1, ids.unsqueeze(2).expand(*ids.shape, dense.shape[2])).to(y.dtype)


class Products:
    """``c (x X^T + 1)``, computed once while the same input goes through several layers (query, key, value).

    It is computed in the dtype of x and rounded at the end to the dtype of the matrix that it is multiplied with.
    """

    def __init__(self) -> None:
        self._of: tuple[Tensor, Tensor, Tensor, bool, torch.dtype, bool] | None = None
        self._product = torch.empty(0)
        self._scales: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(
        self, x: Tensor, recorded: Tensor, c: Tensor, bias: bool, dtype: torch.dtype, scaled: Tensor | None = None
    ) -> Tensor:
        """The product of inputs ``x`` with the ``recorded`` ones, remembered until the next input.

        ``scaled`` is c X^T if the recorded ones contain c already.
        """
        of, how = self._of, (bias, dtype, torch.is_grad_enabled())  # computed without a graph it has no gradient
        known = of is not None and of[0] is x and of[1] is recorded and of[2] is c and of[3:] == how
        if not known:
            scale = self.scale(c, x.dtype)
            if scaled is not None:
                right = scaled if scaled.dtype is x.dtype else scaled.to(x.dtype)
                product = torch.baddbmm(scale, x, right) if bias else torch.bmm(x, right)
            else:
                product = torch.bmm(x, (recorded if recorded.dtype is x.dtype else recorded.to(x.dtype)).mT)
                product = torch.addcmul(scale, product, scale) if bias else product * scale
            self._product = product if dtype is x.dtype else product.to(dtype)
            self._of = (x, recorded, c, *how)
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
    """``a b^T`` of every group. Float16 becomes float32: products of small gradients leave its range."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    dtype = torch.float32 if dtype is torch.float16 else dtype
    return torch.bmm(a.to(dtype), b.to(dtype).transpose(1, 2))


def _columns(d: Tensor, ids: Tensor) -> Tensor:
    """The columns ``ids`` (G, T) of ``d`` (G, S, V): ``(G, S, T)``."""
    return d.gather(2, ids.unsqueeze(1).expand(-1, d.shape[1], -1))


def _sum(products: Tensor) -> Tensor:
    return products.reshape(products.shape[0], -1).sum(1, dtype=wide_dtype(products.dtype))
