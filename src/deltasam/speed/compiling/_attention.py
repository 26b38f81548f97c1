"""Attention in float32, written out in plain operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

_LONGEST = 512  # tokens; the scores, which are then stored, grow with the square


def write_out_attention(graph: Graph) -> None:
    """Replaces fused attention in float32 on a GPU by two products and a softmax, which the compiler can optimise.

    The fused kernels for float32 were made for older GPUs; for lengths of sentences the compiled plain operations are
    several times faster. Their memory grows with the square of the length, so this is limited to 512 tokens. Under
    autocast, where the fused kernels are fast, the graph is not changed.
    """
    if torch.is_autocast_enabled("cuda"):
        return
    for node in graph.nodes:
        if node.target is scaled_dot_product_attention and len(node.args) > 1 and all(map(_short, node.args[:2])):
            node.target = plain_attention


def plain_attention(*args: Any, **kwargs: Any) -> Tensor:
    """``scaled_dot_product_attention`` in plain products and a softmax."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*args, **kwargs)


def _short(each: Any) -> bool:
    """Whether a query or a key is in float32 on a GPU, and known to be short."""
    value = getattr(each, "meta", {}).get("example_value")
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.device.type != "cuda":
        return False
    length = value.shape[-2]
    return isinstance(length, int) and length <= _LONGEST
