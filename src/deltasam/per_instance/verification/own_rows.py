"""Whether the rows of an input belong to the instances that its layout says, where that depends on the content.

A layout is compared with autograd on first use, and holds for all batches of the same shapes: unless the model moves
rows by their content. The logits of the masked tokens only, texts without padding, a batch that is sorted by length,
or images that are scattered into the texts that mention them, have other rows in every batch. Such inputs are
recognised (:meth:`PassState.layout`) and tested in every step, in a captured one on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltasam.per_instance.algebra.calls import Call
from deltasam.per_instance.interception.layout import Layout
from deltasam.per_instance.interception.pass_state import PassState
from deltasam.per_instance.interception.row_moves import sources
from deltasam.per_instance.verification.comparison import Scale
from deltasam.step.gradients import grad

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
    a = _powers(grouping.groups, losses)

    def gradients(weights: Tensor) -> tuple[Tensor | None, ...]:
        total = (losses * weights).sum()
        edges = [call.edge for call in calls]
        return grad(total if scale is None else scale(total), edges, retain_graph=True, allow_unused=True)

    return _differ(calls, gradients(torch.ones_like(losses)), gradients(grouping.spread(a)), a)


def crossed_rows(state: PassState) -> Tensor | None:
    r"""Whether a row of a noted input is computed from a row of an earlier layer that is read as another instance's.

    For an input x of N instances and the outputs y of the layers just before it, the gradient at y of
    :math:`\langle v, x \rangle` is compared with that of :math:`\sum_g a_g \langle v_g, x_g \rangle`, which must be
    :math:`a_g` times as large in the rows of g.

    On the device; None if there is nothing to test. Cost: two backward passes from x to y, a few operations. Must run
    before the graph is freed.
    """
    grouping, found = state.grouping, []
    if grouping.groups == 1:
        return None
    by_node: dict[Any, list[Call]] = {}
    for call, layout in zip(state.calls, state.layouts, strict=True):
        if layout is None or layout.kind != "shared":
            by_node.setdefault(call.edge.node, []).append(call)
    ends = {call.edge.node for call in state.calls}
    for x, layout in state.crossings:
        # Those of a written out parameter, (N, ...), count as well.
        calls = [call for node in sources(x, ends) for call in by_node.get(node, ())]
        if not calls:
            continue
        a = _powers(grouping.groups, x)
        v = torch.arange(1, x.numel() + 1, device=x.device).to(x.dtype).sin().view(x.shape)
        rows = _of_each_row(grouping.spread(a), x.shape[0], layout)
        plain, weighted = (
            grad(torch.sum(x * each), [call.edge for call in calls], retain_graph=True, allow_unused=True)
            for each in (v, v * rows.view(-1, *(1,) * (x.ndim - 1)))
        )
        off = _differ(calls, plain, weighted, a)
        if off is not None:
            found.append(off)
    return torch.stack([each.to(found[0].device) for each in found]).any() if found else None


def _powers(groups: int, like: Tensor) -> Tensor:
    """A factor for each group: powers of two, which round nothing."""
    return 2.0 ** (torch.arange(groups, device=like.device) % 4).to(like.dtype)


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
            off.append((found - expected).float().norm() > _TOLERANCE * expected.float().norm())  # False for NaN
    return torch.stack([each.to(a.device) for each in off]).any() if off else None
