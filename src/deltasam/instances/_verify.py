"""Compares the engine's gradient of one group with autograd's, once per model and kind of input."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from deltasam.instances._errors import InstancesMixedError, MisreadError, UncoveredError
from deltasam.instances._factors import Factor, LowRank, Rows
from deltasam.instances._gradient import InstanceGradients
from deltasam.instances._memory import Memory
from deltasam.instances._step import PassState

#: Relative differences that rounding explains; a weight that is missed or misread differs by a good part of itself.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-2, torch.float16: 0.2, torch.bfloat16: 0.2}


def verify(
    model: nn.Module,
    losses: Tensor,
    params: Mapping[str, Tensor],
    state: PassState,
    gradients: InstanceGradients,
    memory: Memory,
    scale: Callable[[Tensor], Tensor] | None,
    *,
    last: bool,
) -> bool:
    """Whether the engine's gradient of the last group is autograd's; False if there is nothing to compare.

    Raises:
        MisreadError: An input whose shape allowed two readings was misread; the other one is now in the memory.
        InstancesMixedError: The loss of the last instance depends on other rows of the batch.
        UncoveredError: Anything else.
    """
    grouping = state.grouping
    rest = grouping.size - (grouping.groups - 1) * grouping.m
    total = losses[-rest:].sum()
    total = total if scale is None else scale(total)
    expected = torch.autograd.grad(total, list(params.values()), retain_graph=True, allow_unused=True)
    if not bool(gradients.norms().sum() > 0):  # no gradient, or not finite: that says nothing about the engine
        return False
    wrong = _differences(params, expected, gradients, state)
    if not wrong:
        return True
    mixed = 2 * len(wrong) > len(gradients.factors) and _rows_mix(state, total)
    if mixed and memory.order == "flat" and "flat" in state.seen.values():
        memory.order = "tiled"
        memory.layouts.clear()
        raise MisreadError("several rows per instance, which are not next to each other")
    if mixed:
        raise InstancesMixedError(
            "the loss of one instance depends on the other instances of the batch (in-batch negatives, statistics "
            "over the batch), so a perturbation per instance is not defined; use SAM or DeltaSAM for such objectives"
        )
    others = {key: "shared" for key, kind in state.seen.items() if key[0] in wrong and kind != "shared"}
    if others and not last:
        memory.kinds.update(others)  # type: ignore[arg-type]
        memory.layouts.clear()
        raise MisreadError(f"{wrong[0]} is called with inputs that are laid out in another way")
    raise UncoveredError(describe(model, wrong), wrong)


def describe(model: nn.Module, wrong: list[str], operation: str = "an operation") -> str:
    """One message: which parameter, of what module, and what to do."""
    name = wrong[0]
    owner = model.get_submodule(name.rpartition(".")[0])
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return (
        f"{name} ({type(owner).__name__}){more} is used in {operation} that no rule of the low-rank engine covers; "
        "register one with deltasam.instances.register_rule(operation), where operation is the torch function that "
        "takes the parameter"
    )


def _differences(
    params: Mapping[str, Tensor], expected: tuple[Tensor | None, ...], gradients: InstanceGradients, state: PassState
) -> list[str]:
    precisions = {call.weight.dtype for call in state.calls}
    precisions |= {f.d.dtype for found in gradients.factors.values() for f in found if isinstance(f, (LowRank, Rows))}
    tolerance = max((_TOLERANCE.get(dtype, 0.2) for dtype in precisions), default=2e-2)
    biases = _folded_biases(state, gradients)
    rows = []
    for p, reference in zip(params.values(), expected, strict=True):
        parts = [last_group(f) for f in gradients.factors.get(id(p), [])] + biases.get(id(p), [])
        exact = (
            torch.zeros_like(p) if reference is None else reference.to_dense() if reference.is_sparse else reference
        )
        mine = sum((part.to(exact.dtype).reshape(exact.shape) for part in parts), torch.zeros_like(exact))
        rows.append(torch.stack([(mine - exact).norm(), exact.norm()]).float())
    measured = torch.stack(rows)
    floor = 1e-2 * measured[:, 1].norm()
    bad = ~(measured[:, 0] <= tolerance * torch.maximum(measured[:, 1], floor))  # not finite counts as well: see below
    bad &= torch.isfinite(measured).all(1)  # an overflow says nothing about the engine
    return [name for name, is_bad in zip(params, bad.tolist(), strict=True) if is_bad]


def _folded_biases(state: PassState, gradients: InstanceGradients) -> dict[int, list[Tensor]]:
    found: dict[int, list[Tensor]] = {}
    partner = {id(call.weight): call.bias for call in state.calls if call.bias is not None}
    for name, factors in gradients.factors.items():
        for factor in factors:
            if isinstance(factor, LowRank) and factor.bias:
                found.setdefault(id(partner[name]), []).append(factor.d[-1].sum(0))
    return found


def last_group(factor: Factor) -> Tensor:
    """The gradient of the last group, written out."""
    match factor:
        case LowRank():
            return LowRank(factor.x[-1:], factor.d[-1:], factor.bias, factor.transposed).dense()[0]
        case Rows():
            return Rows(factor.ids[-1:], factor.d[-1:], factor.rows).dense()[0]
        case _:
            return factor.dense()[-1]


def _rows_mix(state: PassState, total: Tensor) -> bool:
    """Whether the last group's loss has a gradient in rows of other groups."""
    calls = [call for call in state.calls if call.kind not in ("shared", "hidden")]
    if state.grouping.groups == 1 or not calls:
        return False
    found = torch.autograd.grad(total, [call.edge for call in calls], retain_graph=True, allow_unused=True)
    return any(g is not None and bool((g[:-1] != 0).any()) for g in found)
