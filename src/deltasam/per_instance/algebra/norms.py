"""Per-instance gradients of the scales and shifts of norm layers, computed together for norms of one shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from deltasam.per_instance.algebra.calls import Call
from deltasam.per_instance.algebra.factors import stack_limit, wide_dtype


def norm_gradients(found: Sequence[tuple[Call, Tensor]]) -> Iterator[tuple[Call, Tensor, Tensor]]:
    r"""For every call of a norm, the gradients of its scale and of its shift, ``(G, *features)`` each.

    With :math:`\hat x` the normalised input and d the gradient of the output, :math:`\sum_t d_t \hat x_t` and
    :math:`\sum_t d_t`. A model has dozens of norms of one shape, and on a fast device a small operation costs only its
    launch, so inputs and gradients are stacked and go through four operations together.
    """
    alike: dict[Any, list[tuple[Call, Tensor, Tensor]]] = {}
    for call, gradient in found:
        assert call.inputs is not None
        assert call.arrange is not None
        x, d = call.arrange(call.inputs), call.arrange(gradient)
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
