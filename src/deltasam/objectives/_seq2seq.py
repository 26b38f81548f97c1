"""Sequence-to-sequence models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deltasam.objectives._tokens import Tokens
from deltasam.objectives.batch import unwrapped, without_cache


@dataclass(frozen=True, kw_only=True)
class Seq2Seq(Tokens):
    r"""Cross-entropy of the target sequence, as one loss per sequence; the mean is Hugging Face's loss.

    For a batch without ``decoder_input_ids`` they are made from the labels, by the model's
    ``prepare_decoder_input_ids_from_labels`` or, if it has none, with ``decoder_start_token_id`` and ``pad_token_id``
    of its configuration.

    Arguments, reduction and errors are those of :class:`Tokens`.

    Example:
        >>> import torch
        >>> class Toy(torch.nn.Embedding):
        ...     def forward(self, source, target): return super().forward(target) + super().forward(source).mean()
        >>> tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
        >>> Seq2Seq(label_smoothing=0.1)(Toy(7, 7), ((tokens, tokens), tokens.flip(1))).shape
        torch.Size([2])
    """

    def inputs(self, model: nn.Module, batch: Any) -> Any:
        inputs = super().inputs(model, batch)
        if isinstance(inputs, Mapping) and not {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs):
            labels = self.targets(batch)
            # The models replace only the label -100 by padding.
            labels = labels.masked_fill(labels == self.ignore_index, -100)
            inputs = {**inputs, "decoder_input_ids": _decoder_inputs(model, labels)}
        return without_cache(model, inputs)


def _decoder_inputs(model: nn.Module, labels: Tensor) -> Tensor:
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
