"""Whether the rows of an input belong to the instances that its layout says, where that depends on the content.

A layout is compared with autograd on first use, and holds for all batches of the same shapes: unless the model moves
rows by their content. The logits of the masked tokens only, texts without padding, a batch that is sorted by length,
or images that are scattered into the texts that mention them, have other rows in every batch. Such inputs are
recognised (:meth:`PassState.layout`) and tested in every step, in a captured one on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltasam.per_instance.algebra.calls import Call
from deltasam.per_instance.algebra.grouping import Grouping
from deltasam.per_instance.interception.layout import Layout
from deltasam.per_instance.interception.pass_state import PassState
from deltasam.per_instance.interception.row_moves import leaves_its_place, sources
from deltasam.per_instance.verification.comparison import Scale
from deltasam.step.gradients import grad

_SMALLEST = 1e-4
_TOLERANCE = 1e-2  # a row of another instance is off by its own size at least; exact ones differ by rounding


def mixed_rows(state: PassState, losses: Tensor, scale: Scale | None) -> Tensor | None:
    r"""Whether a row of the chosen inputs has a gradient from the loss of a group that is not its own.

    On the device, so that a captured step can test it, too. None if there is nothing to test.

    Two backward passes to these inputs: of :math:`\sum_g l_g`, with the gradients :math:`D_g`, and of
    :math:`\sum_g a_g l_g`, which must give :math:`a_g D_g`. The a are powers of two, which round nothing.

    Cost: the backward passes go from the losses to these inputs only, most often through a head. Must run before the
    graph is freed.
    """
    calls = [
        call
        for call, layout in zip(state.calls, state.layouts, strict=True)
        if layout is not None and layout.kind in ("batch", "tiled") and id(call.weight) in state.chosen
    ]
    grouping = state.grouping
    if not calls or grouping.groups == 1:
        return None

    return _are_mixed(calls, partial(_gradients, calls, losses, scale), grouping, losses, lambda values: values)


def crossed_rows(state: PassState) -> Tensor | None:
    r"""Whether a row of a noted input is computed from a row of an earlier layer that is read as another instance's.

    For an input x of N instances and the outputs y of the layers just before it, the gradient at y of
    :math:`\langle v, x \rangle` is compared with that of :math:`\sum_g a_g \langle v_g, x_g \rangle`, which must be
    :math:`a_g` times as large in the rows of g.

    On the device; None if there is nothing to test. Cost: two backward passes from x to y, a few operations, unless
    x is the losses and the last layers are frozen. Must run before the graph is freed.
    """
    grouping, found = state.grouping, list[Tensor]()
    if grouping.groups == 1:
        return None
    by_node: dict[Any, list[Call]] = {}
    for call, layout in zip(state.calls, state.layouts, strict=True):
        if layout is None or layout.kind != "shared":
            by_node.setdefault(call.edge.node, []).append(call)
    ends = {call.edge.node for call in state.calls}
    for x, layout, moves in state.crossings:
        # Those of a written out parameter, (N, ...), count as well.
        calls = [call for node in sources(x, ends) for call in by_node.get(node, ())]
        if not calls:
            continue
        known = [leaves_its_place(node, grouping.size) for node in moves]
        if all(each is not None for each in known):
            found += [each for each in known if each is not None]
            continue
        v = torch.arange(1, x.numel() + 1, device=x.device).to(x.dtype).sin().view(x.shape)

        def gradients(rows: Tensor, x: Tensor = x, v: Tensor = v, calls: list[Call] = calls) -> Any:
            total = torch.sum(x * (v * rows.view(-1, *(1,) * (x.ndim - 1))))
            return grad(total, [call.edge for call in calls], retain_graph=True, allow_unused=True)

        def rows_of(values: Tensor, x: Tensor = x, layout: Layout = layout) -> Tensor:
            return _of_each_row(values, x.shape[0], layout)

        off = _are_mixed(calls, gradients, grouping, x, rows_of)
        if off is not None:
            found.append(off)
    return torch.stack([each.to(found[0].device) for each in found]).any() if found else None


def rows_have_one_owner(state: PassState, losses: Tensor, scale: Scale | None) -> bool:
    """Whether each row of the layers before the noted inputs has a gradient from one loss only, whichever it is.

    If so, the rows were moved; if not, the losses mix instances. Waits for the device.
    """
    ends = {call.edge.node for call in state.calls}
    reached = {node for x, _, _ in state.crossings for node in sources(x, ends)}
    calls = [call for call in state.calls if call.edge.node in reached or id(call.weight) in state.chosen]
    groups = torch.arange(state.grouping.groups, device=losses.device)
    weights = state.grouping.spread(2.0 ** (groups % 8).to(losses.dtype))

    plain, weighted = (_gradients(calls, losses, scale, each) for each in (torch.ones_like(weights), weights))
    for one, other in zip(plain, weighted, strict=True):
        if one is not None and other is not None:
            d, found = (each.float().reshape(-1, each.shape[-1]) for each in (one, other))
            ratio = (d * found).sum(1) / (d * d).sum(1).clamp_min(torch.finfo(d.dtype).tiny)
            a = 2.0 ** ratio.clamp_min(1.0).log2().round()
            off = (found - a.unsqueeze(1) * d).norm(dim=1) > _TOLERANCE * found.norm(dim=1)
            if bool(off.any()):
                return False
    return True


def _are_mixed(
    calls: Sequence[Call],
    gradients: Callable[[Tensor], Sequence[Tensor | None]],
    grouping: Grouping,
    like: Tensor,
    rows_of: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Whether the gradients for the factors of the groups are not these factors times the plain ones.

    The factors are powers of two, which round nothing. Two digits of the number of a group tell 64 groups apart.
    """
    numbers = torch.arange(grouping.groups, device=like.device)
    plain = gradients(rows_of(torch.ones(grouping.size, device=like.device, dtype=like.dtype)))
    off = []
    for digit in (numbers % 8, numbers // 8 % 8)[: 1 + (grouping.groups > 8)]:
        a = 2.0 ** digit.to(like.dtype)
        off.append(_differ(calls, plain, gradients(rows_of(grouping.spread(a))), a))
    known = [each for each in off if each is not None]
    return torch.stack(known).any() if known else None


def _gradients(
    calls: Sequence[Call], losses: Tensor, scale: Scale | None, weights: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of the weighted sum of the losses at the outputs of the calls."""
    total = (losses * weights).sum()
    edges = [call.edge for call in calls]
    return grad(total if scale is None else scale(total), edges, retain_graph=True, allow_unused=True)


def _of_each_row(values: Tensor, rows: int, layout: Layout) -> Tensor:
    """The values of the instances, (N,), for each of k N rows."""
    times = rows // values.shape[0]
    return values.repeat(times) if layout.kind == "tiled" else values.repeat_interleave(times)


def _differ(
    calls: Sequence[Call], plain: Sequence[Tensor | None], weighted: Sequence[Tensor | None], a: Tensor
) -> Tensor | None:
    """Whether a gradient is not a times the plain one in the rows of a group."""
    off = []
    for call, one, other in zip(calls, plain, weighted, strict=True):
        if one is not None and other is not None:
            d, found = call.arranged(one), call.arranged(other)
            expected = d * a.to(d.device, d.dtype).view(-1, *(1,) * (d.ndim - 1))
            norms = expected.float().flatten(1).norm(dim=1)
            floor = _SMALLEST * norms.max()  # rounding, where an instance has next to no gradient
            far = (found - expected).float().flatten(1).norm(dim=1) > _TOLERANCE * norms.maximum(floor)
            off.append(far.any())  # False for NaN
    return torch.stack([each.to(a.device) for each in off]).any() if off else None
