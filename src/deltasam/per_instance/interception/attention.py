"""The rule for ``nn.MultiheadAttention``: unpacks its projections, so that the rule of ``F.linear`` applies."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltasam.per_instance.interception.pass_state import PassState


def attention(
    state: PassState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    heads: int,
    in_weight: Tensor | None,
    in_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` in the same order of operations, hence with the same dropout masks."""
    if query.ndim != 3 or bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None:
        state.refuse("attention with add_bias_kv, add_zero_attn or unbatched inputs", in_weight, out_weight)
    sources = _instances_first(query, key, value)
    if use_separate_proj_weight:
        matrices: list[Any] = [q_proj_weight, k_proj_weight, v_proj_weight]
        biases = (None, None, None) if in_bias is None else in_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip(sources, matrices, biases, strict=True))
    else:
        q, k, v = _packed(sources, in_weight, in_bias)
    size, length, width = q.shape
    q, k, v = (t.view(size, -1, heads, width // heads).transpose(1, 2) for t in (q, k, v))
    mask = _mask(attn_mask, key_padding_mask, size, heads, q.dtype)
    rate = dropout if training else 0.0
    weights: Tensor | None = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(2, 3)
        weights = F.softmax(scores if mask is None else scores + mask, -1)
        # One dimension for instances and heads, as in torch, so that the mask is drawn in the same order.
        weights = F.dropout(weights.flatten(0, 1), rate).view_as(weights) if rate > 0 else weights
        mixed = weights @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal and mask is None)
    output = F.linear(mixed.transpose(1, 2).reshape(size, length, width), out_weight, out_bias)
    output = output.transpose(0, 1).contiguous()  # in memory as in torch, for the dropout that follows
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    return output, weights


def _instances_first(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """(T, N, E) to (N, T, E); inputs that are the same tensor stay one."""
    turned: dict[int, Tensor] = {}
    return [turned.setdefault(id(x), x.transpose(0, 1)) for x in (query, key, value)]


def _packed(sources: list[Tensor], weight: Any, bias: Any) -> list[Tensor]:
    # Every distinct input goes through the whole packed matrix; outputs that are not used have no gradient.
    found: dict[int, Tensor] = {id(x): x for x in sources}
    projected = {name: F.linear(x, weight, bias).chunk(3, -1) for name, x in found.items()}
    return [projected[id(x)][part] for part, x in enumerate(sources)]


def _mask(
    attn_mask: Tensor | None, padding: Tensor | None, size: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    total: Tensor | None = None
    if attn_mask is not None:
        total = _additive(attn_mask, dtype)
        total = total.view(size, heads, *total.shape[1:]) if total.ndim == 3 else total
    if padding is not None:
        columns = _additive(padding, dtype).view(size, 1, 1, -1)
        total = columns if total is None else total + columns
    return total


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
