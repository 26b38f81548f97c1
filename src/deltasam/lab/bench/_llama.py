"""Llama shapes by name: random weights, created on the device in the precision of the base model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import nn

from deltasam.lab.bench.options import StepOptions

BASE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama; ``kv_heads`` are the heads of keys and values, ``mlp`` is the width of its MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    tied: bool = False


LLAMAS: dict[str, LlamaShape] = {
    "llama-tiny": LlamaShape(2, 64, 4, 2, 128, 128, tied=True),  # for tests
    "llama-135m": LlamaShape(30, 576, 9, 3, 1536, 49152, tied=True),  # SmolLM2
    "llama-1.1b": LlamaShape(22, 2048, 32, 4, 5632, 32000),  # TinyLlama
    "llama-7b": LlamaShape(32, 4096, 32, 32, 11008, 32000),
}


def llama(options: StepOptions) -> tuple[nn.Module, Any]:
    """Returns the model and a batch of random tokens. With ``lora``, the weights have the type of the precision.

    Rows are full, so there is no padding. The labels are the tokens: every position but the first is a target.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = chosen_shape(options)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(2048, options.length),
        tie_word_embeddings=shape.tied,
        attention_dropout=0.0 if options.lora else options.dropout,
        use_cache=False,
    )
    with _default_type(BASE_TYPES.get(options.precision) if options.lora else None):
        model = LlamaForCausalLM(config)
    tokens = torch.randint(shape.vocab, (options.batch, options.length))
    return model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def chosen_shape(options: StepOptions) -> LlamaShape:
    """Returns the named shape with the given sizes. The MLP and the heads of keys and values follow them."""
    named = LLAMAS[options.model]
    hidden, heads = options.hidden or named.hidden, options.heads or named.heads
    if hidden % (2 * heads):
        raise ValueError(f"hidden={hidden} must be a multiple of 2 * heads={2 * heads}")
    return LlamaShape(
        layers=options.layers or named.layers,
        hidden=hidden,
        heads=heads,
        kv_heads=gcd(heads, named.kv_heads),
        mlp=round(named.mlp * hidden / named.hidden),
        vocab=options.vocab or named.vocab,
        tied=named.tied,
    )


@contextmanager
def _default_type(kind: torch.dtype | None) -> Iterator[None]:
    """Inside, new floating-point tensors have this type: no second copy of the weights in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
