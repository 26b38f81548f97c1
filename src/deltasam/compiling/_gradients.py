"""Gradients of weights that leave their product in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_VIEWS = (_aten.slice.Tensor, _aten.permute.default, _aten.view.default, _aten.reshape.default, _aten.t.default)


def keep_float32(graph: Graph) -> None:
    """Writes ``float32(A^T D)``, a gradient, as one product with a float32 result.

    Autocast computes the gradient of a weight in bfloat16 (or float16) and casts it to the weight's float32: the
    product's sums, which are float32 inside, are rounded, written, read, and written again. Here the product writes
    them once, unrounded. Only for what leaves the graph: elsewhere casts are fused into what follows. Needs torch 2.8.
    """
    if not hasattr(_aten.mm, "dtype"):
        return
    for product in graph.find_nodes(op="call_function", target=_aten.mm.default):
        ends = list(_ends(product))
        if not ends or not _is_half_on_gpu(product) or not all(_is_result(end) for end in ends):
            continue
        product.target, product.args = _aten.mm.dtype, (*product.args, torch.float32)
        _retype(product)
        for cast in ends:
            cast.replace_all_uses_with(cast.all_input_nodes[0])
            graph.erase_node(cast)


def _ends(node: Node) -> Iterator[Node]:
    """The first users that are not views."""
    for user in node.users:
        if user.target in _VIEWS:
            yield from _ends(user)
        else:
            yield user


def _is_result(node: Node) -> bool:
    """Whether this is a cast to float32 that is handed out, whole or in parts."""
    if node.target is not _CAST or node.args[1] != torch.float32:
        return False
    handed_to = list(_ends(node))
    return bool(handed_to) and all(user.op == "output" for user in handed_to)


def _is_half_on_gpu(node: Node) -> bool:
    value: Any = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype in (torch.bfloat16, torch.float16)


def _retype(node: Node) -> None:
    """What is known of the values: the same shapes and strides, in float32."""
    node.meta["val"] = torch.empty_like(node.meta["val"], dtype=torch.float32)
    for user in node.users:
        if user.target in _VIEWS:
            _retype(user)
