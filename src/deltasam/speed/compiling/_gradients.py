"""Gradients of weights that leave their product in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from deltasam._torch import inductor_multiplies_to_float32

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_TURNS = (_aten.permute.default, _aten.t.default)
_VIEWS = (*_TURNS, _aten.slice.Tensor, _aten.view.default, _aten.reshape.default)


def keep_float32(graph: Graph) -> None:
    """Writes ``float32(A^T D)``, a gradient, as one product with a float32 result.

    Autocast computes the gradient of a weight in bfloat16 (or float16) and casts it to the weight's float32: the
    product's sums, which are float32 inside, are rounded, written, read, and written again. Here the product writes
    them once, unrounded. Only for what leaves the graph: elsewhere casts are fused into what follows. Results of the
    forward pass that are cast to float32 without anything in between are such products, too.
    """
    if not compiler_knows():
        return
    for product in graph.find_nodes(op="call_function", target=_aten.mm.default):
        readers = list(_past(product, _TURNS))
        if len(readers) == 1 and _is_half_on_gpu(product) and _is_cast_of_a_result(readers[0]):
            product.target, product.args = _aten.mm.dtype, (*product.args, torch.float32)
            _retype(product)
            readers[0].replace_all_uses_with(readers[0].all_input_nodes[0])
            graph.erase_node(readers[0])


def compiler_knows() -> bool:
    """Whether there is such a product on these GPUs and Inductor can compile it (torch 2.9 or later)."""
    if not hasattr(_aten.mm, "dtype") or torch.version.hip is not None:
        return False
    return inductor_multiplies_to_float32()


def _past(node: Node, views: tuple[Any, ...]) -> Iterator[Node]:
    """Who reads the values of a node, by way of views or not."""
    for user in node.users:
        if user.target in views:
            yield from _past(user, views)
        else:
            yield user


def _is_cast_of_a_result(node: Node) -> bool:
    """Whether this is a cast to float32 that is handed out, whole or in parts."""
    if node.target is not _CAST or node.args[1] != torch.float32:
        return False
    readers = list(_past(node, _VIEWS))
    return bool(readers) and all(reader.op == "output" for reader in readers)


def _is_half_on_gpu(node: Node) -> bool:
    value: Any = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype in (torch.bfloat16, torch.float16)


def _retype(node: Node) -> None:
    """What is known of the values: the same shapes and strides, in float32."""
    node.meta["val"] = node.meta["val"].to(torch.float32)  # of a product or a turned one: dense, so strides are kept
    for user in node.users:
        if user.target in _TURNS:
            _retype(user)
