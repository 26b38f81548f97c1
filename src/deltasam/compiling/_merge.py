"""Layers that read the same input as one product: query, key and value, for example."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn.functional import linear


def merge_layers(graph: Graph) -> None:
    """Writes ``linear(x, W_1), ..., linear(x, W_k)`` as ``linear(x, [W_1; ...; W_k])`` and its parts.

    One product of k times the size fills a GPU that k products one after the other do not; the backward pass has two
    products where it had 2k. Under autocast the joint weight costs nothing: the weights are copied there anyway, to
    the lower precision. Elsewhere it would be one more copy, and the graph stays as it is.
    """
    for together in list(_groups(graph)):
        if torch.is_autocast_enabled(_value(together[0].args[1]).device.type):
            _merge(graph, together)


def _groups(graph: Graph) -> Iterator[Sequence[Node]]:
    """The layers with the same input, between two points where the input, or the mode, could change."""
    groups: dict[Any, list[Node]] = defaultdict(list)
    stretch = 0
    for node in graph.nodes:
        if _has_effects(node):
            stretch += 1
        elif node.target is linear and not node.kwargs and _weight_is_given(node):
            source, weight, *bias = node.args
            kind = _value(weight)
            has_bias = bool(bias) and bias[0] is not None
            groups[(stretch, source, has_bias, kind.dtype, kind.device)].append(node)
    return (group for group in groups.values() if len(group) > 1)


def _merge(graph: Graph, layers: Sequence[Node]) -> None:
    source = layers[0].args[0]
    sizes = [_value(layer.args[1]).shape[0] for layer in layers]
    with graph.inserting_before(layers[0]):
        joint = [_joint(graph, [layer.args[1] for layer in layers])]
        if len(layers[0].args) > 2 and layers[0].args[2] is not None:
            joint.append(_joint(graph, [layer.args[2] for layer in layers]))
        product = graph.call_function(linear, (source, *joint))
        parts = graph.call_function(torch.split, (product, sizes), {"dim": -1})
        for place, layer in enumerate(layers):
            part = graph.call_function(operator.getitem, (parts, place))
            part.meta.update(layer.meta)
            layer.replace_all_uses_with(part)
    for layer in layers:
        graph.erase_node(layer)


def _joint(graph: Graph, tensors: list[Any]) -> Node:
    return graph.call_function(torch.cat, (tensors,))


def _weight_is_given(layer: Node) -> bool:
    """Whether weight and bias are inputs of the graph, which are there before anything is computed."""
    given = [each for each in layer.args[1:] if each is not None]
    return all(isinstance(each, Node) and each.op in ("placeholder", "get_attr") and _known(each) for each in given)


def _known(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["example_value"]
    return value


def _has_effects(node: Node) -> bool:
    """Whether a node may change tensors in place, or the mode in which the next ones run.

    By its name, generously: a graph in which nothing is merged is slower, not wrong.
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("setitem", "__setitem__")
    return in_place or "out" in node.kwargs or "enter" in name or "exit" in name or name.startswith("_set_")
