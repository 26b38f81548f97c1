"""Operations between two layers that can move rows from one instance to another, by what is in the batch.

The layers before and after such an operation may both have k N rows and still disagree about whose they are: a batch
that is sorted inside the model, or images that are scattered into the texts that mention them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from deltasam._torch import dimension_of, indices_of, shape_before

#: Operations that choose rows.
CHOOSING = frozenset(f"{name}Backward0" for name in ("Index", "IndexSelect", "MaskedSelect", "Gather", "Take"))
_MOVING = CHOOSING | {
    *(f"{name}Backward0" for name in ("MaskedScatter", "IndexPut", "IndexPutImpl", "IndexCopy", "IndexAdd", "Put",
                                      "Scatter", "ScatterAdd", "ScatterReduce", "Sort", "Topk", "SplitWithSizes",
                                      "SegmentReduce")),
    "ScatterBackward1",
}  # fmt: skip


def moves_between(tensor: Tensor, ends: Collection[Any]) -> set[Any]:
    """The operations between the tensor and the nodes ``ends`` of its graph that can move rows."""
    return {node for node in nodes_before(tensor, ends) if node not in ends and _moves(node)}


def sources(tensor: Tensor, ends: Collection[Any]) -> list[Any]:
    """The nodes among ``ends`` from which the tensor is computed without another of them in between."""
    return [node for node in nodes_before(tensor, ends) if node in ends]


def rows_taken(node: Any, size: int) -> Tensor | None:
    """The integers i of ``x[i, ...]``, if both x and the result have N rows; None for another operation.

    The usual pooling of a causal model, ``x[arange(N), last]``, is of this kind.
    """
    indices = indices_of(node) if node.name() == "IndexBackward0" and shape_before(node)[:1] == (size,) else None
    index = indices[0] if indices else None
    if index is None or index.dtype not in (torch.int64, torch.int32) or index.ndim == 0 or index.shape[0] != size:
        return None
    return index


def leaves_its_place(node: Any, size: int) -> Tensor | None:
    """Whether ``x[i, ...]`` of N rows is anything but row i at place i: a test without a backward; else None."""
    index = rows_taken(node, size)
    if index is None:
        return None
    rows = torch.arange(size, device=index.device).view(-1, *(1,) * (index.ndim - 1))
    return torch.any(index != rows)


def nodes_before(tensor: Tensor, ends: Collection[Any]) -> Iterator[Any]:
    """The nodes of the graph of a tensor up to ``ends``, and the ends that are reached."""
    waiting: list[Any] = [tensor.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        if node not in ends:
            others = {other for other, _ in node.next_functions if other is not None} - seen
            seen |= others
            waiting += others


def _moves(node: Any) -> bool:
    """Whether this operation can move rows. Only the first dimension holds instances."""
    name = node.name()
    if name not in _MOVING:
        return False
    if name.startswith(("IndexBackward", "IndexPut")):
        indices = indices_of(node)
        return indices is None or indices[0] is not None
    return dimension_of(node) == 0
