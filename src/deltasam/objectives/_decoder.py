"""The inputs that a Hugging Face decoder needs when it is called without labels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from deltasam.objectives.batch import unwrapped


def decoder_inputs(model: nn.Module, labels: Tensor) -> Tensor:
    """The decoder's inputs for the labels (N, T; -100 for padding): the labels shifted right by one.

    The model's own function is used if there is one (mBART moves its language code to the front).
    """
    inner = unwrapped(model)
    prepare = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        made: Tensor = prepare(labels=labels)
        return made
    config = getattr(inner, "config", None)
    start, pad = getattr(config, "decoder_start_token_id", None), getattr(config, "pad_token_id", None)
    if start is None or pad is None:
        raise ValueError(
            f"Seq2Seq: the batch has no 'decoder_input_ids', and {type(inner).__name__} cannot make them: it has no "
            "prepare_decoder_input_ids_from_labels, and no config with decoder_start_token_id and pad_token_id; "
            "add decoder_input_ids to the batch, or pass Seq2Seq(predict=...)"
        )
    moved = labels.roll(1, dims=1)
    moved[:, 0] = start
    return moved.masked_fill(moved == -100, pad)


def without_cache(model: nn.Module, inputs: Any) -> Any:
    """Adds ``use_cache=False`` for a model that would otherwise fill a key-value cache, because it gets no labels."""
    if not isinstance(inputs, Mapping) or "use_cache" in inputs:
        return inputs
    inner = unwrapped(model)
    if hasattr(inner, "get_base_model"):  # PEFT's adapters pass their arguments on
        inner = inner.get_base_model()
    caches = getattr(getattr(inner, "config", None), "use_cache", False)
    if caches and "use_cache" in inspect.signature(inner.forward).parameters:
        return {**inputs, "use_cache": False}
    return inputs
