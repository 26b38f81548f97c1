"""The perturbations of one pass, applied to the outputs of the layers: ``y_i + c_i (x_i X_i^T) D_i``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from deltasam.per_instance.algebra.factors import (
    Dense,
    Factor,
    LowRank,
    Packed,
    Products,
    add_linear,
    add_rows,
    linear_move,
    rest_of,
    waits_for_host,
    wide_dtype,
)
from deltasam.per_instance.algebra.grouping import Grouping
from deltasam.per_instance.algebra.own_weights import own_product, own_values, rounding_of


@dataclass(frozen=True, eq=False)
class Perturbation:
    """eps_g of every group."""

    grouping: Grouping
    terms: Mapping[int, list[tuple[Factor, Tensor]]]  # by parameter (``id``): factors with their coefficients (G,)
    vectors: Mapping[int, Tensor] = field(default_factory=dict)  # see InstanceGradients
    products: Products = field(default_factory=Products)
    _made: dict[tuple[int, bool], dict[int, Tensor]] = field(default_factory=dict)
    _moves: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _own: dict[tuple[int, torch.dtype], Tensor | None] = field(default_factory=dict)  # by parameter (``id``)
    _pieces: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # by pack (``id``) and start

    def own_product(
        self, weight: Tensor, bias: Tensor | None, x: Tensor, matrix: Tensor, offset: Tensor | None, transposed: bool
    ) -> Tensor | None:
        """The whole layer ``x matrix^T + offset``, perturbed, if the matrices of the groups are written out; or None.

        ``weight`` and ``bias`` are the parameters as they are stored; the bias is None if it is not perturbed.
        """
        terms = self.terms.get(id(weight), ())
        if not terms or type(x) is not Tensor or not all(isinstance(factor, Dense) for factor, _ in terms):
            return None
        key = (id(weight), x.dtype)
        if key not in self._own:
            rounding = rounding_of(x.dtype, x.device)
            self._own[key] = None if rounding == "lost" else own_values(weight, terms, x.dtype, rounding)
        own = self._own[key]
        if own is None:
            return None
        shift = None if offset is None else offset.detach().to(x.dtype).view(1, 1, -1)
        moves = () if bias is None else self.terms.get(id(bias), ())
        if bias is not None and moves:  # added in float32, unless all of the layer is in half precision
            shift = own_values(bias, moves, x.dtype, "bf16" if x.dtype is torch.bfloat16 else "none").unsqueeze(1)
        return own_product(x, matrix, offset, own.mT if transposed else own, shift)

    @cached_property
    def is_eager(self) -> bool:
        """Whether a GPU computes the pass, and the host launches every operation."""
        c = next((terms[0][1] for terms in self.terms.values() if terms), None)
        return c is not None and waits_for_host(c.device)

    def low_rank(self, weight: Tensor, bias: Tensor | None, transposed: bool) -> tuple[LowRank, Tensor] | None:
        """The factor of a weight and its coefficients, if it is the only one of the weight and of the bias."""
        terms = self.terms.get(id(weight), ())
        if len(terms) != 1 or (bias is not None and id(bias) in self.terms):
            return None
        factor, c = terms[0]
        return (factor, c) if type(factor) is LowRank and factor.transposed == transposed else None

    def linear(self, weight: Tensor, bias: Tensor | None, x: Tensor, y: Tensor, transposed: bool) -> Tensor:
        """The output ``y`` of a layer at w, perturbed. The factors of the weight include a bias that is folded in."""
        for factor, c in self.terms.get(id(weight), ()):
            y = add_linear(y, x, factor, c, self.products, transposed)
        if bias is not None:
            for factor, c in self.terms.get(id(bias), ()):
                y = y + self._move(factor, c, spread=False).unsqueeze(1).to(y.dtype)
        return y

    def linear_move(
        self, weight: Tensor, bias: Tensor | None, x: Tensor, out: int, transposed: bool = False
    ) -> Tensor | None:
        """What the perturbation adds to the output of a layer, (G, S, out), in the dtype of x; None for nothing."""
        move = None
        for factor, c in self.terms.get(id(weight), ()):
            if move is None:
                move = linear_move(x, factor, c, self.products, transposed, out)
            else:
                move = add_linear(move, x, factor, c, self.products, transposed)
        if bias is not None:
            for factor, c in self.terms.get(id(bias), ()):
                own = self._move(factor, c, spread=False).unsqueeze(1).to(x.dtype)
                move = own.expand(*x.shape[:2], -1).contiguous() if move is None else move + own
        return move

    def rows(self, table: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        """The rows ``y`` of a table at w, perturbed."""
        for factor, c in self.terms.get(id(table), ()):
            y = add_rows(y, ids, factor, c)
        return y

    def values(self, parameter: Tensor) -> Tensor:
        """The parameter of every instance, ``(N, *shape)``, in float32 at least: bfloat16 would round it away."""
        terms = self.terms.get(id(parameter), ())
        if len(terms) == 1 and id(parameter) in self.vectors:
            return self._vectors(*terms[0])[id(parameter)].view(self.grouping.size, *parameter.shape)
        dtype = wide_dtype(parameter.dtype)
        value = parameter.to(dtype).unsqueeze(0)
        if self.grouping.size == 1:
            # Nothing is summed over the instances, so .grad would be a view of a gradient that others share, and what
            # changes it in place (accumulation, clipping) would change theirs. The backward of a product is a new one.
            value = value * 1
        for factor, c in terms:
            value = value + self._move(factor, c, spread=True).reshape(-1, *parameter.shape).to(dtype)
        return value.expand(self.grouping.size, *parameter.shape)

    def as_rows(self, parameter: Tensor) -> Tensor | None:
        """A packed vector of every instance as ``(N, 1, length)``, to scale or shift rows; None if not packed."""
        terms = self.terms.get(id(parameter), ())
        if len(terms) == 1 and parameter.ndim == 1 and id(parameter) in self.vectors:
            return self._vectors(*terms[0])[id(parameter)]
        return None

    def move_of(self, parameter: Tensor) -> Tensor | None:
        """What is added to a packed vector of every instance, (N, 1, length), without a graph; None if not packed."""
        terms = self.terms.get(id(parameter), ())
        if len(terms) != 1 or parameter.ndim != 1:
            return None
        factor, c = terms[0]
        if not isinstance(factor, Packed):
            return None
        pieces = self._pieces.get(id(factor.pack))
        if pieces is None:
            wide = factor.pack.to(wide_dtype(factor.pack.dtype))
            move = self.grouping.spread(wide * c.unsqueeze(1)).unsqueeze(1)
            every = (f for found in self.terms.values() for f, _ in found)
            spans = {f.start: f.shape.numel() for f in every if isinstance(f, Packed) and f.pack is factor.pack}
            sizes = [spans[start] for start in sorted(spans)]
            if sum(sizes) == move.shape[2]:  # all at once: on a fast device the time of slices counts
                pieces = dict(zip(sorted(spans), torch.split(move, sizes, 2), strict=True))
            else:
                pieces = {start: move[:, :, start : start + size] for start, size in spans.items()}
            self._pieces[id(factor.pack)] = pieces
        return pieces[factor.start]

    def _vectors(self, factor: Factor, c: Tensor) -> dict[int, Tensor]:
        """All vectors (scales and shifts of norms) of a pack, perturbed in one operation, ``(N, 1, length)`` each."""
        assert isinstance(factor, Packed)
        key = (id(factor.pack), torch.is_grad_enabled())  # computed without a graph they have no gradient
        if key not in self._made:
            packs = {name: getattr(self.terms[name][0][0], "pack", None) for name in self.vectors}
            members = {name: p for name, p in self.vectors.items() if packs[name] is factor.pack}
            flat = torch.cat([p.reshape(-1) for p in members.values()])
            move = factor.pack * c.unsqueeze(1).to(factor.pack.dtype)
            moved = flat.to(wide_dtype(flat.dtype)) + self.grouping.spread(move)
            pieces = torch.split(moved.unsqueeze(1), [p.numel() for p in members.values()], 2)
            self._made[key] = dict(zip(members, pieces, strict=True))
        return self._made[key]

    def _move(self, factor: Factor, c: Tensor, *, spread: bool) -> Tensor:
        """``c`` times the factor, per group or (``spread``) per instance; a pack is multiplied only once."""
        if isinstance(factor, Packed):
            key = (id(factor.pack), id(c))
            if key not in self._moves:
                self._moves[key] = factor.pack.to(wide_dtype(factor.pack.dtype)) * c.unsqueeze(1)
            move = self._moves[key][:, factor.start : factor.start + factor.shape.numel()]
        else:
            dense = factor.dense()
            move = dense.to(wide_dtype(dense.dtype)) * rest_of(factor, c).view(-1, *(1,) * (dense.ndim - 1))
        return self.grouping.spread(move) if spread else move
