"""Layers that read the same input as one product: query, key and value, for example."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn import functional as F
from torch.nn.functional import linear

from deltasam._torch import is_wrapper_subclass

# Operations that write to nothing and need no strides; what is not named may do anything. Results of the views may
# share memory with what they were given.
_VIEWS: frozenset[str | Callable[..., Any]] = frozenset((
    "view", "reshape", "transpose", "permute", "unflatten", "flatten", "chunk", "split", "unsqueeze", "squeeze",
    "expand", "contiguous", "to", "float", "type_as",
    operator.getitem, torch.reshape, torch.transpose, torch.permute, torch.unsqueeze, torch.squeeze, torch.flatten,
    torch.chunk, torch.split, F.dropout,
))  # fmt: skip
_READS: frozenset[str | Callable[..., Any]] = frozenset((
    "clone", "size", "dim", "matmul", "bmm", "softmax", "masked_fill", "repeat", "mean", "sum", "pow", "tanh",
    "sigmoid", "relu", "sin", "cos",
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.matmul,
    torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.bmm, torch.baddbmm, torch.cat, torch.stack,
    torch.where, torch.softmax, torch.tanh, torch.sigmoid, torch.relu, torch.rsqrt, torch.mean, torch.sum, torch.pow,
    torch.sin, torch.cos, torch.clone,
    linear, F.gelu, F.relu, F.silu, F.softmax, F.layer_norm, F.embedding, F.scaled_dot_product_attention,
    *([F.rms_norm] if hasattr(F, "rms_norm") else []),
))  # fmt: skip
_ATTRIBUTES = ("shape", "dtype", "device", "ndim")


def merge_layers(graph: Graph) -> None:
    """Writes ``linear(x, W_1), ..., linear(x, W_k)`` as ``linear(x, [W_1; ...; W_k])`` and its parts.

    One product of k times the size fills a GPU that k products one after the other do not; the backward pass has two
    products where it had 2k. Under autocast the joint weight costs nothing: the weights are copied there anyway, to
    the lower precision. Elsewhere it would be one more copy, and the graph stays as it is; likewise where weights have
    that precision already, or the model switches autocast itself.

    The graph has not been made functional yet, and a part of the joint result has gaps between its rows. So layers are
    merged only where all operations between them, and all that read their results, are known to write to nothing and
    to need no strides. A layer that is left alone is slower, not wrong.
    """
    if any("autocast" in getattr(node.target, "__name__", "") for node in graph.nodes):
        return
    for layers in list(_groups(graph)):
        _merge(graph, layers)


def _groups(graph: Graph) -> Iterator[Sequence[Node]]:
    """The layers with the same input, between two points where the input could change."""
    groups: dict[Any, list[Node]] = defaultdict(list)
    stretch = 0
    for node in graph.nodes:
        if not _only_reads(node):
            stretch += 1
        elif node.target is linear and _can_be_joined(node) and _is_only_read(node):
            given = [None if each is None else _value(each) for each in node.args[1:]]
            # with a frozen layer in between, its gradient would be computed for nothing
            learn = tuple(each is not None and each.requires_grad for each in given)
            weight, has_bias = _value(node.args[1]), len(given) > 1 and given[1] is not None
            groups[stretch, node.args[0], has_bias, weight.dtype, weight.device, learn].append(node)
    return (group for group in groups.values() if len(group) > 1)


def _merge(graph: Graph, layers: Sequence[Node]) -> None:
    sizes = [_value(layer.args[1]).shape[0] for layer in layers]
    with graph.inserting_before(layers[0]):
        joint = [graph.call_function(torch.cat, ([layer.args[1] for layer in layers],))]
        if len(layers[0].args) > 2 and layers[0].args[2] is not None:
            joint.append(graph.call_function(torch.cat, ([layer.args[2] for layer in layers],)))
        product = graph.call_function(linear, (layers[0].args[0], *joint))
        parts = graph.call_function(torch.split, (product, sizes), {"dim": -1})
        for place, layer in enumerate(layers):
            part = graph.call_function(operator.getitem, (parts, place))
            part.meta.update(layer.meta)
            layer.replace_all_uses_with(part)
            _allow_gaps(part)
    for layer in layers:
        graph.erase_node(layer)


def _allow_gaps(node: Node) -> None:
    """Lets views copy where they must: the rows of a part do not lie side by side."""
    for user in node.users:
        if user.op == "call_method" and user.target == "view":
            user.target = "reshape"
        if user.target in _VIEWS:
            _allow_gaps(user)


def _can_be_joined(layer: Node) -> bool:
    """Whether weight and bias are ordinary inputs of the graph, and autocast will copy them to another precision."""
    given = [each for each in layer.args[1:] if each is not None]
    if layer.kwargs or not given or not all(_is_given(each) for each in given):
        return False
    weight, *bias = (_value(each) for each in given)
    device = weight.device.type
    return (
        torch.is_autocast_enabled(device)
        and weight.dtype != torch.get_autocast_dtype(device)
        and weight.dim() == 2
        and all(each.shape == weight.shape[:1] for each in bias)
    )


def _is_given(each: Any) -> bool:
    """Whether this is there before anything is computed, and a plain tensor: not quantised, not sharded."""
    if not isinstance(each, Node) or each.op not in ("placeholder", "get_attr"):
        return False
    value = each.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not is_wrapper_subclass(value)


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["example_value"]
    return value


def _only_reads(node: Node) -> bool:
    """Whether a node is known to change no tensor."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if node.target is getattr:
        return node.args[1] in _ATTRIBUTES
    in_place = node.kwargs.get("inplace") or (node.args and node.args[-1] is True)  # the last of the arguments
    return (node.target in _VIEWS or node.target in _READS) and not in_place and "out" not in node.kwargs


def _is_only_read(node: Node) -> bool:
    """Whether a part of the joint result may stand for this: nobody writes to it, hands it out, asks how it lies."""
    return all(
        user.op != "output" and _only_reads(user) and (user.target not in _VIEWS or _is_only_read(user))
        for user in node.users
    )
