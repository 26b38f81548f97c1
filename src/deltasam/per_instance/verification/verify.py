"""Compares the engine's gradients of two groups with autograd's, once per model and kind of input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor, nn

from deltasam.per_instance.algebra.factors import Factor, LowRank, Rows
from deltasam.per_instance.algebra.gradient import InstanceGradients
from deltasam.per_instance.interception.calls import PassState
from deltasam.per_instance.interception.slots import ParameterSlots
from deltasam.per_instance.interception.tensors import CallKey, Kind
from deltasam.per_instance.verification.errors import MisreadError, SuspectedMixError, UncoveredError

_SHARED: Kind = "shared"

#: Relative differences that rounding explains; a weight that is missed or misread differs by a good part of itself.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-2, torch.float16: 0.2, torch.bfloat16: 0.2}


@dataclass(frozen=True, eq=False)
class Checked:
    """One group whose gradient at w was found right, and what is needed to look at what that cannot show.

    Attributes:
        group: The number of the group; -1 if no group has a gradient.
        members: Its instances.
        gradients: Its gradient by autograd, one per parameter, with the loss scale.
        unfelt: ParameterSlots of calls whose outputs have no gradient (detached ones): it cannot prove their reading.
        halves: Whether the layers compute in half precision.
        proves: Whether every gradient could be compared.
    """

    group: int
    members: slice
    gradients: list[Tensor | None]
    unfelt: tuple[CallKey, ...]
    halves: bool
    proves: bool


@dataclass(frozen=True, eq=False)
class Comparison:
    """The engine's gradients of one pass beside autograd's.

    Attributes:
        places: Where the parameters are.
        losses: With their graph.
        state: Of the pass.
        found: The gradients of the outputs of the calls.
        gradients: What was made of them.
        scale: Loss scaling.
        last: There is no other attempt.
    """

    places: ParameterSlots
    losses: Tensor
    state: PassState
    found: Sequence[Tensor | None]
    gradients: InstanceGradients
    scale: Callable[[Tensor], Tensor] | None
    last: bool

    def checked(self) -> Checked | None:
        """Compares two groups; None if no gradient is finite.

        The groups are those with the largest finite gradients: one without says nothing about the engine. Two, because
        a table of positions that is taken for the batch is read right for an instance that uses no other position.

        Raises:
            MisreadError: An input whose shape allowed two readings was misread; the other one is now in the memory.
            SuspectedMixError: The loss of the group depends on other rows of the batch.
            UncoveredError: Anything else.
        """
        checks = [self._one(group) for group in _telling_groups(self.gradients.norms())]
        return replace(checks[0], proves=all(each.proves for each in checks)) if checks else None

    def _one(self, group: int) -> Checked:
        state, grouping, params = self.state, self.state.grouping, self.places.params
        members = slice(group * grouping.m, min((group + 1) * grouping.m, grouping.size))
        # Where the engine sees no gradient at all: is there any?
        total = self.losses[members].sum() if group >= 0 else self.losses.sum()
        total = total if self.scale is None else self.scale(total)
        expected = torch.autograd.grad(total, list(params.values()), retain_graph=True, allow_unused=True)
        wrong, conclusive = _differences(params, expected, self.gradients, state, group)
        calls = list(zip(state.calls, self.found, strict=True))
        if group < 0:  # a gradient that somebody made zero is not the engine's fault; a use that it has not seen is
            called = {id(p) for call, g in calls if g is not None for p in call[:2]}
            wrong = [name for name in wrong if id(params[name]) not in called]
        if wrong:
            mixed = 2 * len(wrong) > len(self.gradients.factors) and group >= 0 and _rows_mix(state, total, group)
            _explain(self.places, state, wrong, members, mixed=mixed, last=self.last)
        unfelt = tuple(call.key for call, g in calls if g is None and call.key is not None)
        halves = any(g is not None and g.dtype in (torch.float16, torch.bfloat16) for g in self.found)
        proves = conclusive and (group >= 0 or all(g is None for g in expected))
        return Checked(group, members, list(expected), unfelt, halves, proves)


def _telling_groups(norms: Tensor) -> list[int]:
    """The two groups with the largest finite gradients; -1 if all are zero, nothing if none is finite."""
    finite = torch.where(torch.isfinite(norms), norms, torch.zeros_like(norms))
    values, groups = torch.topk(finite, min(2, finite.numel()))
    telling = [group for value, group in zip(values.tolist(), groups.tolist(), strict=True) if value > 0]
    return telling or ([-1] if bool(torch.isfinite(norms).all()) else [])


def _explain(
    places: ParameterSlots, state: PassState, wrong: list[str], members: slice, *, mixed: bool, last: bool
) -> NoReturn:
    """Raises what a wrong gradient means: another reading is to be tried, or the model is not for the engine."""
    memory, size = places.memory, state.size
    if mixed and memory.reading.order == "flat" and any(kind == "flat" for kind, _ in state.seen.values()):
        memory.reading.order = "tiled"
        memory.layouts.clear()
        raise MisreadError("several rows per instance, which are not next to each other")
    if mixed:
        raise SuspectedMixError(size, members)
    others = {key: _SHARED for key, (kind, _) in state.seen.items() if key[0] in wrong and kind != "shared"}
    if others and not last:
        memory.learn(others)
        raise MisreadError(f"{wrong[0]} is called with inputs that are laid out in another way")
    fault = UncoveredError(describe(places.model, wrong), wrong)
    if places.fault is None:
        places.suspect(_candidates(places, state, wrong), fault)
    if not last and places.guess():
        raise MisreadError(f"{wrong[0]} meets tensors that are laid out in another way")
    places.take_back()
    raise places.fault or fault


def _candidates(places: ParameterSlots, state: PassState, wrong: list[str]) -> list[CallKey]:
    """Operations without a rule that have taken a tensor for the batch: one of them may have been shared.

    Which one it was the gradient does not say. Tensors of N rows and more dimensions are taken for batches rightly in
    most cases, so their turn comes last. A parameter that no operation was seen to take is another matter.
    """
    called = {id(p) for call in state.calls for p in (call.weight, call.bias)}
    if not any(id(places.params[name]) in called for name in wrong):
        return []
    left = [key for key, (kind, _) in state.seen.items() if key[0] not in places.params and kind != "shared"]
    return sorted(left, key=lambda key: (key[2], key[1]))


def describe(model: nn.Module, wrong: list[str], operation: str = "an operation") -> str:
    """One message: which parameter, of what module, and what to do."""
    name = wrong[0]
    owner = model.get_submodule(name.rpartition(".")[0])
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return (
        f"{name} ({type(owner).__name__}){more} is used in {operation} that no rule of the low-rank engine covers; "
        "register one with deltasam.per_instance.register_rule(operation), where operation is the torch function that "
        "takes the parameter"
    )


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
    # An overflow, or an instance that is not finite, says nothing about the engine, nor about other parameters.
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


def _rows_mix(state: PassState, total: Tensor, group: int) -> bool:
    """Whether the loss of a group has a gradient in rows of other groups."""
    calls = [call for call in state.calls if call.kind not in ("shared", "hidden")]
    if state.grouping.groups == 1 or not calls:
        return False
    found = torch.autograd.grad(total, [call.edge for call in calls], retain_graph=True, allow_unused=True)
    for call, gradient in zip(calls, found, strict=True):
        if gradient is not None:
            rows = gradient if call.arrange is None else call.arrange(gradient)
            if bool((rows[:group] != 0).any()) or bool((rows[group + 1 :] != 0).any()):
                return True
    return False
