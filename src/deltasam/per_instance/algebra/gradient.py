"""The gradients of all groups with respect to all perturbed parameters, as factors, made from the recorded calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltasam.per_instance.algebra.calls import Call
from deltasam.per_instance.algebra.costs import Kept, Layer, Machine, choose, machine
from deltasam.per_instance.algebra.factors import (
    Dense,
    Factor,
    LowRank,
    Packed,
    Rows,
    Stack,
    dot,
    squares_of,
    stack_limit,
    sum_of_squares,
    waits_for_host,
    wide_dtype,
)
from deltasam.per_instance.algebra.grouping import Grouping
from deltasam.per_instance.algebra.own_weights import Rounding, rounding_of


@dataclass(frozen=True, eq=False)
class InstanceGradients:
    """One gradient per group."""

    grouping: Grouping
    factors: dict[int, list[Factor]]  # by parameter (``id``): the factors whose sum is its gradient
    vectors: dict[int, Tensor]  # scales and shifts of norms whose only factor is part of a pack, by ``id``
    device: torch.device  # of the losses
    stacks: tuple[Stack, ...] = ()  # that hold inputs of the factors

    def dot(self, other: InstanceGradients) -> Tensor:
        """Inner products with another set of gradients, per group, ``(G,)``."""
        pairs = [(a, b) for name, mine in self.factors.items() for a in mine for b in other.factors.get(name, ())]
        return self._total([dot(a, b) for a, b in pairs])

    def norms(self) -> Tensor:
        """``||grad_g||`` of every group, ``(G,)``, in float32 at least."""
        terms = sum_of_squares([factor for found in self.factors.values() for factor in found])
        for found in self.factors.values():  # a parameter with several uses: the cross terms
            terms += [2 * dot(a, b) for k, a in enumerate(found) for b in found[:k]]
        return self._total(terms).clamp_min(0).sqrt()

    def norms_of_each(self) -> dict[int, Tensor]:
        """``||grad_g||`` with respect to every parameter (``id``), ``(G,)``."""
        return {name: self._squares(found).clamp_min(0).sqrt() for name, found in self.factors.items()}

    def _squares(self, found: Sequence[Factor]) -> Tensor:
        return self._total([dot(a, b) for a in found for b in found])

    def times(self, factors: Mapping[int, Tensor]) -> InstanceGradients:
        """These gradients, those of each parameter (``id``) multiplied by its own factors ``(G,)``."""
        packs: dict[int, Tensor] = {}
        members: dict[int, list[tuple[int, Packed]]] = {}
        for name, found in self.factors.items():
            for factor in found:
                if isinstance(factor, Packed):
                    members.setdefault(id(factor.pack), []).append((name, factor))
        for pack, parts in members.items():
            parts.sort(key=lambda part: part[1].start)
            columns = [factors[name].unsqueeze(1).expand(-1, part.shape.numel()) for name, part in parts]
            packs[pack] = _product(parts[0][1].pack, torch.cat(columns, 1))

        def scaled(name: int, factor: Factor) -> Factor:
            match factor:
                case Packed():
                    return replace(factor, pack=packs[id(factor.pack)])
                case Dense():
                    return Dense(_product(factor.value, factors[name]), own=factor.own, once=factor.once)
                case _:
                    return replace(factor, d=_product(factor.d, factors[name]))

        return replace(
            self, factors={name: [scaled(name, factor) for factor in found] for name, found in self.factors.items()}
        )

    def rounded(self, *, widening: bool = False) -> InstanceGradients:
        """These gradients with bfloat16 output gradients in float32 low-rank factors; take the norms before.

        ``widening`` restricts this to layers with more outputs than inputs, where d is the larger factor.
        """

        def narrow(factor: Factor) -> Factor:
            if not isinstance(factor, LowRank) or factor.d.dtype is not torch.float32:
                return factor
            if widening and factor.d.shape[2] <= factor.x.shape[2]:
                return factor
            return replace(factor, d=factor.d.to(torch.bfloat16))

        factors = {name: [narrow(f) for f in found] for name, found in self.factors.items()}
        return replace(self, factors=factors)

    def for_one_pass(self) -> InstanceGradients:
        """These gradients for one perturbed pass, which may write its matrices to their memory."""

        def last(factor: Factor) -> Factor:
            return replace(factor, once=True) if isinstance(factor, Dense) and factor.own else factor

        for stack in self.stacks:
            stack.once = True
        if not any(type(factor) is Dense for found in self.factors.values() for factor in found):
            return self
        return replace(self, factors={name: [last(f) for f in found] for name, found in self.factors.items()})

    def kept_of_matrices(self) -> int:
        """Bytes of the factors of weights that are used as matrices."""
        tensors: dict[int, Tensor] = {}
        for factor in (factor for found in self.factors.values() for factor in found):
            match factor:
                case LowRank():
                    tensors.update((id(t), t) for t in (factor.x, factor.d))
                case Dense():
                    tensors[id(factor.value)] = factor.value
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def only(self, params: Iterable[Tensor]) -> InstanceGradients:
        """These gradients with respect to some parameters only; a bias that is folded in stays with its weight."""
        wanted = {id(p) for p in params}
        if wanted >= self.factors.keys():
            return self
        return replace(self, factors={k: found for k, found in self.factors.items() if k in wanted}, vectors={})

    def without(self, groups: Tensor) -> InstanceGradients:
        """These gradients with zeros for some groups, a mask (G,), whatever their values were."""

        def clean(values: Tensor) -> Tensor:
            return values.masked_fill(groups.to(values.device).view(-1, *(1,) * (values.ndim - 1)), 0)

        def cleaned(factor: Factor) -> Factor:
            match factor:
                case LowRank():
                    return replace(factor, x=clean(factor.x), d=clean(factor.d))
                case Rows():
                    return replace(factor, d=clean(factor.d))
                case _:
                    return Dense(clean(factor.dense()))  # no longer packed: such steps are rare

        factors = {name: [cleaned(f) for f in found] for name, found in self.factors.items()}
        return replace(self, factors=factors, vectors={}, stacks=())

    def _total(self, terms: list[Tensor]) -> Tensor:
        """The sum of terms (G,); zeros if no perturbed parameter took part in the losses."""
        if not terms:
            return torch.zeros(self.grouping.groups, device=self.device)
        wide = wide_dtype(terms[0].dtype)
        where = terms[0].device
        same = all(term.dtype is wide and term.device == where for term in terms)
        return torch.stack(terms if same else [term.to(where, wide) for term in terms]).sum(0)


def _product(values: Tensor, factors: Tensor) -> Tensor:
    """Values (G, ...) times factors (G,) or (G, ...), in the precision of the values, rounded once."""
    factors = factors.to(values.device).view(*factors.shape, *(1,) * (values.ndim - factors.ndim))
    return (values * factors).to(values.dtype)


def collect(
    calls: list[Call],
    gradients: list[Tensor | None],
    grouping: Grouping,
    device: torch.device,
    *,
    fold: bool = True,
    most: int | None = None,
    together: Collection[int] = (),
    frozen: Collection[int] = (),
    empty: bool = False,
) -> InstanceGradients:
    """Factors from the calls and the gradients of their outputs, in the cheaper form for each weight.

    Args:
        calls: The recorded calls.
        gradients: The gradients of their outputs.
        grouping: The groups.
        device: Where the losses are.
        fold: Keep the gradient of a bias with that of its weight where that is possible.
        most: How many bytes of the gradients of matrices to keep at most, see :func:`~.costs.choose`.
        together: The parameters (``id``) with a use that cannot take one matrix per group.
        frozen: Those that are not trained.
        empty: Empty both lists, so that what is written out does not need the memory of its inputs as well.
    """
    inputs: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}  # one that query, key and value share stays one
    uses: dict[int, list[tuple[Call, Tensor]]] = {}
    for call, gradient in zip(calls, gradients, strict=True):
        if gradient is not None:
            rows = call.arranged(gradient) if call.form == "matrix" else gradient
            uses.setdefault(id(call.weight), []).append((call, rows))
    if empty:
        calls.clear()
        gradients.clear()
    partners = _biases(uses) if fold else dict.fromkeys(uses)
    forms = _forms(uses, together, frozen, most)
    factors: dict[int, list[Factor]] = {}
    norms = [
        use for found in uses.values() for use in found if use[0].form == "norm"
    ]  # later, those of a shape at once
    for name in list(uses):
        found = uses.pop(name)
        if forms.get(name) == "written":
            _write_out([use for use in found if use[0].form == "matrix"], factors, own=name not in together)
        for call, d in found:
            match call.form:
                case "dense":
                    factors.setdefault(name, []).append(Dense(grouping.total(d)))
                case "rows":
                    factors.setdefault(name, []).append(_table(call, d))
                case "matrix" if forms[name] == "low-rank":
                    assert call.inputs is not None
                    key = (id(call.inputs), d.dtype)
                    if key not in inputs:
                        x = call.inputs
                        inputs[key] = x, x if x.dtype is d.dtype else x.to(d.dtype)
                    folded = partners[name] is not None and call.bias is not None
                    factors.setdefault(name, []).append(LowRank(inputs[key][1], d, folded, call.transposed))
                    if not folded:
                        _add_bias(factors, call, d)
    vectors = _add_norms(factors, norms)
    _pack(factors, vectors)
    inputs.clear()
    stacks = _stack(factors) if waits_for_host(device) else ()
    return InstanceGradients(grouping, factors, vectors, device, stacks)


def _stack(factors: dict[int, list[Factor]]) -> tuple[Stack, ...]:
    """Stacks the inputs of layers whose weight has one use, so that one operation multiplies them with c."""
    alike: dict[Any, dict[int, list[list[Factor]]]] = {}  # by shape and by input: the lists whose factors have it
    odd: set[int] = set()
    for found in factors.values():
        for factor in found:
            if type(factor) is LowRank:
                x = factor.x
                alike.setdefault((x.shape, x.dtype, x.device), {}).setdefault(id(x), []).append(found)
                if len(found) > 1 or factor.transposed or x.dtype is torch.float16:  # c X could leave its range
                    odd.add(id(x))
    stacks: list[Stack] = []
    for (shape, _, device), members in alike.items():
        usual = [lists for name, lists in members.items() if name not in odd]
        several = max(2, 4 * stack_limit(device) // max(1, shape.numel()))
        for start in range(0, len(usual), several):
            some = usual[start : start + several]
            stacks.append(stack := Stack(torch.stack([_low_rank(lists[0]).x for lists in some])))
            for place, (lists, x) in enumerate(zip(some, stack.values.unbind(0), strict=True)):
                for found in lists:  # now, so that the memory of these inputs is free before the next stack
                    found[0] = LowRank(x, (old := _low_rank(found)).d, old.bias, False, stack, place)
    return tuple(stacks)


def _low_rank(found: list[Factor]) -> LowRank:
    (factor,) = found
    assert isinstance(factor, LowRank)
    return factor


def _forms(
    uses: dict[int, list[tuple[Call, Tensor]]], together: Collection[int], frozen: Collection[int], most: int | None
) -> dict[int, Kept]:
    """The form of every weight that is used as a matrix."""
    sharing: dict[int, set[int]] = {}
    matrices = {name: [use for use in found if use[0].form == "matrix"] for name, found in uses.items()}
    for name, found in matrices.items():
        for call, _ in found:
            sharing.setdefault(id(call.inputs), set()).add(name)
    layers: dict[int, Layer] = {}
    machines: list[Machine] = []
    roundings: dict[tuple[torch.dtype, torch.device], Rounding] = {}
    for name, found in matrices.items():
        if found:
            call, d = found[0]
            assert call.inputs is not None
            kind = (d.dtype, d.device)
            rounding = roundings[kind] = roundings.get(kind) or rounding_of(*kind)
            layers[name] = Layer(
                groups=d.shape[0],
                rows=d.shape[1] if len(found) == 1 else sum(each.shape[1] for _, each in found),
                inputs=call.inputs.shape[2],
                outputs=d.shape[2],
                itemsize=d.element_size(),
                sharing=len(sharing[id(call.inputs)]) if len(found) == 1 else 1,
                own=name not in together and rounding != "lost",
                trained=name not in frozen,
            )
            machines.append(machine(d.device, d.dtype, tf32=rounding == "tf32"))
    return dict(zip(layers, choose((*layers.values(),), (*machines,), most), strict=True))


def _write_out(found: list[tuple[Call, Tensor]], factors: dict[int, list[Factor]], *, own: bool) -> None:
    """Adds the gradients of one weight, the sum over its calls, and of its biases."""
    value: Tensor | None = None
    for call, d in found:
        assert call.inputs is not None
        x = call.inputs.to(d.dtype)
        left, right = (x, d) if call.transposed else (d, x)
        if value is None or value.dtype is not d.dtype:
            product = torch.bmm(left.mT, right)
            value = product if value is None else value + product
        else:
            value.baddbmm_(left.mT, right)
        _add_bias(factors, call, d)
    assert value is not None
    squares = squares_of(value)  # now, while the gradients are in the cache of the device
    weight = found[0][0].weight
    factors.setdefault(id(weight), []).append(Dense(value.view(-1, *weight.shape), squares, own))


def _add_bias(factors: dict[int, list[Factor]], call: Call, d: Tensor) -> None:
    if call.bias is not None:
        _accumulate(factors, id(call.bias), d.sum(1, dtype=wide_dtype(d.dtype)))


def _table(call: Call, d: Tensor) -> Rows | Dense:
    """The gradient of a table. A short one is written out: the norm of :class:`Rows` compares all pairs of lookups.

    Relative positions are a table of few rows with T x T lookups, so there would be T^4 pairs.
    """
    assert call.inputs is not None
    if call.padding is not None:
        d = d.masked_fill((call.inputs == call.padding).unsqueeze(2), 0)
    rows = Rows(call.inputs, d, call.weight.shape[0])
    return Dense(rows.dense()) if rows.is_short else rows


def _add_norms(factors: dict[int, list[Factor]], norms: list[tuple[Call, Tensor]]) -> dict[int, Tensor]:
    """Adds the gradients of scales and shifts; returns, by ``id``, the parameters that have no other factor."""
    for call, scale, shift in _norm_gradients(norms):
        _accumulate(factors, id(call.weight), scale)
        if call.bias is not None:
            _accumulate(factors, id(call.bias), shift)
    theirs = {id(p): p for call, _ in norms for p in (call.weight, call.bias) if p is not None}
    return {name: p for name, p in theirs.items() if len(factors.get(name, ())) == 1}


def _norm_gradients(found: Sequence[tuple[Call, Tensor]]) -> Iterator[tuple[Call, Tensor, Tensor]]:
    r"""For every call of a norm, the gradients of its scale and of its shift, ``(G, *features)`` each.

    They are :math:`\sum_t d_t \hat x_t` and :math:`\sum_t d_t`, with :math:`\hat x` the normalised input and d the
    gradient of the output. Norms of one shape are stacked: a model has dozens, and each operation costs a launch.
    """
    alike: dict[Any, list[tuple[Call, Tensor, Tensor]]] = {}
    for call, gradient in found:
        assert call.inputs is not None
        x, d = call.arranged(call.inputs), call.arranged(gradient)
        alike.setdefault((call.normal, x.shape, x.dtype, d.dtype, d.device), []).append((call, x, d))
    for members in alike.values():
        several = max(1, stack_limit(members[0][1].device) // max(1, members[0][1].numel()))
        for start in range(0, len(members), several):
            yield from _together(members[start : start + several])


def _together(members: list[Any]) -> Iterator[tuple[Call, Tensor, Tensor]]:
    normal = members[0][0].normal
    assert normal is not None
    x, d = (_side_by_side([member[k] for member in members]) for k in (1, 2))
    wide = wide_dtype(d.dtype)
    scales = (d * normal(x).to(d.dtype)).sum(2, dtype=wide)
    shifts = d.sum(2, dtype=wide)
    for (call, _, _), scale, shift in zip(members, scales.unbind(0), shifts.unbind(0), strict=True):
        yield call, scale, shift


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    """``(len, ...)``; a single tensor is not copied."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _pack(factors: dict[int, list[Factor]], vectors: dict[int, Tensor]) -> None:
    """Packs vectors side by side, so that one operation serves them all: first those of norms, then the others."""
    packs: dict[Any, list[tuple[int, int, Dense]]] = {}
    for name in [*vectors, *(name for name in factors if name not in vectors)]:
        for k, factor in enumerate(factors[name]):
            if isinstance(factor, Dense) and factor.value.ndim <= 2:
                own = vectors[name].dtype if name in vectors else None
                kind = (factor.value.device, factor.value.dtype, own)
                packs.setdefault(kind, []).append((name, k, factor))
    for members in packs.values():
        values = [factor.value for _, _, factor in members]
        pack = torch.cat([value if value.ndim == 2 else value.unsqueeze(1) for value in values], 1)
        start = 0
        for (name, k, _), value in zip(members, values, strict=True):
            factors[name][k] = packed = Packed(pack, start, value.shape[1:])
            start += packed.shape.numel()
    for name in [name for name in vectors if not isinstance(factors[name][0], Packed)]:
        del vectors[name]  # it has several dimensions


def _biases(uses: dict[int, list[tuple[Call, Tensor]]]) -> dict[int, Tensor | None]:
    """The bias that can be folded into the factors of a weight: its only one, which no other weight is used with."""
    owners: dict[int, set[int]] = {}
    for name, found in uses.items():
        for call, _ in found:
            if call.bias is not None:
                owners.setdefault(id(call.bias), set()).add(name)
    folded: dict[int, Tensor | None] = {}
    for name, found in uses.items():
        biases = {id(call.bias): call.bias for call, _ in found}
        only = next(iter(biases.values())) if len(biases) == 1 else None
        alone = only is not None and owners[id(only)] == {name} and id(only) not in uses
        folded[name] = only if alone else None
    return folded


def _accumulate(factors: dict[int, list[Factor]], name: int, value: Tensor) -> None:
    """Adds to the dense factor of a vector, so that a module called many times (ALBERT's layers) keeps only one."""
    found = factors.setdefault(name, [])
    for k, factor in enumerate(found):
        if isinstance(factor, Dense):
            found[k] = Dense(factor.value + value)
            return
    found.append(Dense(value))
