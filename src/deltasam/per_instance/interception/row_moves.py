"""Operations between two layers that can move rows from one instance to another, by what is in the batch.

The layers before and after such an operation may both have k N rows and still disagree about whose they are: a batch
that is sorted inside the model, or images that are scattered into the texts that mention them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

#: Operations that choose rows.
CHOOSING = frozenset(f"{name}Backward0" for name in ("Index", "IndexSelect", "MaskedSelect", "Gather", "Take"))
_PLACING = frozenset({
    *(f"{name}Backward0" for name in ("MaskedScatter", "IndexPut", "IndexPutImpl", "IndexCopy", "IndexAdd",
                                      "ScatterAdd", "ScatterReduce", "Sort", "Topk", "Put")),
    "ScatterBackward0", "ScatterBackward1",
})  # fmt: skip
_SIGN = 1 << 63  # dimensions are stored without a sign


def moves_rows(tensor: Tensor, ends: Collection[Any]) -> bool:
    """Whether an operation that can move rows lies between the tensor and the nodes ``ends`` of its graph."""
    return any(_moves(node) for node in _nodes(tensor, ends) if node not in ends)


def sources(tensor: Tensor, ends: Collection[Any]) -> list[Any]:
    """The nodes among ``ends`` from which the tensor is computed without another of them in between."""
    return [node for node in _nodes(tensor, ends) if node in ends]


def _nodes(tensor: Tensor, ends: Collection[Any]) -> Iterator[Any]:
    """The nodes between, and the ends that are reached."""
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
    if name not in CHOOSING and name not in _PLACING:
        return False
    if name.startswith(("IndexBackward", "IndexPut")):
        return node._saved_indices[0] is not None
    dim = getattr(node, "_saved_dim", 0)
    return (dim - 2 * _SIGN + _ndim(node) if dim >= _SIGN else dim) == 0


def _ndim(node: Any) -> int:
    """The number of dimensions of what an operation with a dimension counted from the end was called with."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is not None:
        return len(sizes)
    return int(getattr(node, "_saved_source_dim", node._saved_index.ndim))
