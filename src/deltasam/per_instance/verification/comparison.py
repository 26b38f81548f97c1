"""Compares the engine's gradients of two groups with autograd's, once per model and kind of input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor, nn

from deltasam.per_instance.algebra.factors import Factor, LowRank, Rows
from deltasam.per_instance.algebra.gradient import InstanceGradients
from deltasam.per_instance.errors import MisreadError, SuspectedMixError, UncoveredError
from deltasam.per_instance.interception.batch_rule import Place
from deltasam.per_instance.interception.pass_state import PassState
from deltasam.per_instance.interception.slots import ParameterSlots, first_of_each_kind

#: Relative differences that rounding explains; a weight that is missed or misread differs by a good part of itself.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-2, torch.float16: 0.2, torch.bfloat16: 0.2}

Scale = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class CheckResult:
    """One group whose gradient at w is right, and what later checks need."""

    group: int  # its number; -1 if no group has a gradient
    members: slice  # its instances
    gradients: list[Tensor | None]  # by autograd, one per parameter, with the loss scale
    unproven: frozenset[Place]  # calls whose output has no gradient (detached), which does not prove their layout
    is_half: bool  # whether layers compute in half precision
    is_conclusive: bool  # whether every gradient could be compared


def compare(
    slots: ParameterSlots,
    losses: Tensor,
    state: PassState,
    found: Sequence[Tensor | None],
    gradients: InstanceGradients,
    scale: Scale | None,
) -> CheckResult | None:
    """Compares the two groups with the largest finite gradients; None if no gradient is finite.

    Two groups, because one can be right by chance: an instance that uses a single position does not show that a table
    of positions was taken for the batch. Where a gradient is not compared (quantized weights, and frozen ones that are
    too many), the rows of the outputs that a group depends on must be its own.

    ``found`` are the gradients of the outputs of the calls, ``gradients`` the factors made from them.

    Raises:
        MisreadError: The layout of an input was misread; carries the correction.
        SuspectedMixError: The loss of a group depends on other rows of the batch.
        UncoveredError: The gradients differ for another reason.
    """

    def check(group: int) -> CheckResult:
        grouping, params = state.grouping, slots.compared
        members = slice(group * grouping.m, min((group + 1) * grouping.m, grouping.size))
        # If the engine sees no gradient at all: does autograd?
        total = losses[members].sum() if group >= 0 else losses.sum()
        total = total if scale is None else scale(total)
        targets = list(params.values())
        expected = torch.autograd.grad(total, targets, retain_graph=True, allow_unused=True) if targets else ()
        wrong, comparable = _differences(params, expected, gradients, state, group) if targets else ([], True)
        if group < 0:  # a hook may have set a gradient to zero; only uses that the engine has not seen are its fault
            called = {id(p) for call, g in zip(state.calls, found, strict=True) if g is not None for p in call[:2]}
            wrong = [name for name in wrong if id(params[name]) not in called]
        if wrong:
            mixed = 2 * len(wrong) > len(gradients.factors) and group >= 0 and _rows_mix(state, total, group)
            _raise_cause(slots, state, wrong, members, mixed=mixed)
        others = first_of_each_kind(name for name in slots.params if name not in params)
        if others and group >= 0 and _rows_mix(state, total, group, {id(slots.params[name]) for name in others}):
            _raise_cause(slots, state, sorted(others), members, mixed=True)
        layouts = [layout for layout, g in zip(state.layouts, found, strict=True) if g is None and layout is not None]
        unproven = frozenset(layout.place for layout in layouts if layout.place and layout.kind != "shared")
        is_half = any(g is not None and g.dtype in (torch.float16, torch.bfloat16) for g in found)
        conclusive = comparable and (group >= 0 or all(g is None for g in expected))
        return CheckResult(group, members, list(expected), unproven, is_half, conclusive)

    first = None
    for group in _telling_groups(gradients.norms()):
        found_here = check(group)  # its gradients may be as large as the model: those of the second group are dropped
        if first is None:
            first = found_here
        else:
            first = replace(first, is_conclusive=first.is_conclusive and found_here.is_conclusive)
        del found_here
    return first


def _telling_groups(norms: Tensor) -> list[int]:
    """The two groups with the largest finite gradients; -1 if all are zero, nothing if none is finite."""
    finite = torch.where(torch.isfinite(norms), norms, torch.zeros_like(norms))
    values, groups = torch.topk(finite, min(2, finite.numel()))
    telling = [group for value, group in zip(values.tolist(), groups.tolist(), strict=True) if value > 0]
    return telling or ([-1] if bool(torch.isfinite(norms).all()) else [])


def _raise_cause(
    slots: ParameterSlots, state: PassState, wrong: list[str], members: slice, *, mixed: bool
) -> NoReturn:
    """Raises the reason for a wrong gradient: an exception to the batch rule, or a model that is not covered."""
    table = state.layout_table
    if hooked := [name for name in wrong if name in slots.hooked]:
        raise UncoveredError(
            f"a hook (register_hook) changes the gradient of {and_more(hooked)}: change .grad after the step instead",
            hooked,
        )
    if mixed and not table.tiled and table.may_be_tiled():
        raise MisreadError("several rows per instance, which are not adjacent", tiled=True)
    if mixed:
        raise SuspectedMixError(state.size, members)
    shared = table.not_shared(wrong)
    if shared:
        raise MisreadError(f"{wrong[0]} is called with an input that is not laid out like the batch", shared=shared)
    message = describe(slots.model, wrong)
    if operations := table.operations():
        message += (
            f". Or {', '.join(operations)} takes a tensor that is the same for all instances, but its first dimension "
            f"is a multiple of N = {state.size}; give it a first dimension of 1 with unsqueeze(0)"
        )
    raise UncoveredError(message, wrong)


def describe(model: nn.Module, wrong: list[str], operation: str = "an operation") -> str:
    """A message with the parameter, its module and the remedy."""
    owner = model.get_submodule(wrong[0].rpartition(".")[0])
    used = f"{and_more(wrong, f' ({type(owner).__name__})')} {'is' if len(wrong) == 1 else 'are'} used"
    return (
        f"{used} in {operation} that no rule of the low-rank engine covers; register one for that torch "
        "function with deltasam.per_instance.register_rule"
    )


def and_more(names: Sequence[str], kind: str = "") -> str:
    """The first name with its kind, and how many more there are."""
    return f"{names[0]}{kind}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


def _differences(
    params: Mapping[str, Tensor],
    expected: Sequence[Tensor | None],
    gradients: InstanceGradients,
    state: PassState,
    group: int,
) -> tuple[list[str], bool]:
    """The parameters whose gradient is not autograd's, and whether all could be compared."""
    precisions = {call.weight.dtype for call in state.calls}
    precisions |= {f.d.dtype for fs in gradients.factors.values() for f in fs if isinstance(f, (LowRank, Rows))}
    tolerance = max((_TOLERANCE.get(dtype, 0.2) for dtype in precisions), default=2e-2)
    biases = _folded_biases(state, gradients, group)
    rows = []
    for p, reference in zip(params.values(), expected, strict=True):
        parts = [of_group(f, group) for f in gradients.factors.get(id(p), [])] + biases.get(id(p), [])
        exact = (
            torch.zeros_like(p) if reference is None else reference.to_dense() if reference.is_sparse else reference
        )
        mine = sum((part.to(exact.dtype).reshape(exact.shape) for part in parts), torch.zeros_like(exact))
        rows.append(torch.stack([(mine - exact).norm(), exact.norm()]).float())
    measured = torch.stack([row.to(rows[0].device) for row in rows])
    # An overflow, or an instance that is not finite, proves nothing about the engine, nor about other parameters.
    finite = torch.isfinite(measured).all(1)
    floor = 1e-2 * measured[finite, 1].norm()
    bad = finite & (measured[:, 0] > tolerance * torch.maximum(measured[:, 1], floor))
    return [name for name, is_bad in zip(params, bad.tolist(), strict=True) if is_bad], bool(finite.all())


def _folded_biases(state: PassState, gradients: InstanceGradients, group: int) -> dict[int, list[Tensor]]:
    found: dict[int, list[Tensor]] = {}
    partner = {id(call.weight): call.bias for call in state.calls if call.bias is not None}
    for name, factors in gradients.factors.items():
        for factor in factors:
            if isinstance(factor, LowRank) and factor.bias:
                found.setdefault(id(partner[name]), []).append(factor.d[group].sum(0))
    return found


def of_group(factor: Factor, group: int) -> Tensor:
    """The gradient of one group, written out."""
    one = slice(group, group + 1 or None)
    match factor:
        case LowRank():
            return LowRank(factor.x[one], factor.d[one], factor.bias, factor.transposed).dense()[0]
        case Rows():
            return Rows(factor.ids[one], factor.d[one], factor.rows).dense()[0]
        case _:
            return factor.dense()[group]


def _rows_mix(state: PassState, total: Tensor, group: int, weights: set[int] | None = None) -> bool:
    """Whether the loss of a group has a gradient in rows of other groups, in the layers of some weights (``id``)."""
    calls = [
        call
        for call, layout in zip(state.calls, state.layouts, strict=True)
        if layout is not None and layout.kind in ("batch", "tiled") and (not weights or id(call.weight) in weights)
    ]
    if state.grouping.groups == 1 or not calls:
        return False
    found = torch.autograd.grad(total, [call.edge for call in calls], retain_graph=True, allow_unused=True)
    for call, gradient in zip(calls, found, strict=True):
        if gradient is not None:
            rows = call.arranged(gradient)
            if bool((rows[:group] != 0).any()) or bool((rows[group + 1 :] != 0).any()):
                return True
    return False
