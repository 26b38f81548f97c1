"""Sequence-to-sequence models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from deltasam.objectives._decoder import decoder_inputs, without_cache
from deltasam.objectives._tokens import Tokens


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
        """The batch without its labels, with the decoder's inputs, and without a cache for generation."""
        inputs = super().inputs(model, batch)
        if isinstance(inputs, Mapping) and not {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs):
            labels = self.targets(batch)
            # The models replace only the label -100 by padding.
            labels = labels.masked_fill(labels == self.ignore_index, -100)
            inputs = {**inputs, "decoder_input_ids": decoder_inputs(model, labels)}
        return without_cache(model, inputs)
