"""Whether the rows of an input still belong to the instances that its layout says: for rows that the model chooses.

A layout is compared with autograd on first use, and holds for all batches of the same shapes: unless the model chooses
rows by their content. The logits of the masked tokens only, texts without padding, or a batch that is sorted by length
have other rows in every batch. Such inputs are recognised (:meth:`PassState.layout`) and tested in every step, in a
captured one on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltasam.per_instance.interception.pass_state import PassState
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
    a = 2.0 ** (torch.arange(grouping.groups, device=losses.device) % 4).to(losses.dtype)

    def gradients(weights: Tensor) -> tuple[Tensor | None, ...]:
        total = (losses * weights).sum()
        edges = [call.edge for call in calls]
        return grad(total if scale is None else scale(total), edges, retain_graph=True, allow_unused=True)

    off = []
    for call, plain, weighted in zip(
        calls, gradients(torch.ones_like(losses)), gradients(grouping.spread(a)), strict=True
    ):
        if plain is not None and weighted is not None:
            d, found = call.arranged(plain), call.arranged(weighted)
            expected = d * a.to(d.device, d.dtype).view(-1, *(1,) * (d.ndim - 1))
            off.append((found - expected).float().norm() > _TOLERANCE * expected.float().norm())  # False for NaN
    return torch.stack([each.to(losses.device) for each in off]).any() if off else None
