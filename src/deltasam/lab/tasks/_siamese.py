"""A classifier of pairs that encodes the two texts separately and compares them by their cosine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD = "cosine_head.safetensors"


class CosineClassifier(nn.Module):
    """Two classes from the cosine of two mean-pooled sentence embeddings: ``logits = head(cos(u, v))``.

    For sentence encoders, whose cosine is meaningful before any training. A joint encoder of both texts would have to
    learn the comparison from scratch.

    Args:
        encoder: A model whose output has a ``last_hidden_state``.
        scale: The head is initialised as ``(-scale/2, scale/2) * (cos - threshold)``.
        threshold: The cosine above which a pair is initially in class 1.
    """

    def __init__(self, encoder: PreTrainedModel, *, scale: float = 8.0, threshold: float = 0.4) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(1, 2)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[-scale / 2], [scale / 2]]))
            self.head.bias.copy_(-threshold * self.head.weight.squeeze(-1))

    @property
    def config(self) -> Any:
        """The configuration of the encoder."""
        return self.encoder.config

    def get_input_embeddings(self) -> nn.Module:
        """Returns the word embeddings of the encoder, to which the regularisers add noise."""
        return self.encoder.get_input_embeddings()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, second_input_ids: Tensor, second_attention_mask: Tensor
    ) -> Tensor:
        """Returns the logits of the pairs, shape (N, 2)."""
        first = self._embedding(input_ids, attention_mask)
        second = self._embedding(second_input_ids, second_attention_mask)
        return self.head(F.cosine_similarity(first, second).unsqueeze(-1))

    def _embedding(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)

    def save_pretrained(self, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Saves the encoder for ``from_pretrained``, and the head in a second file.

        A sharded model is saved from its gathered ``state_dict``.
        """
        from safetensors.torch import save_file

        weights = self.state_dict() if state_dict is None else state_dict
        encoder, head = (
            {name.removeprefix(part): w for name, w in weights.items() if name.startswith(part)}
            for part in ("encoder.", "head.")
        )
        self.encoder.save_pretrained(folder, state_dict=encoder)
        save_file(head, str(Path(folder) / _HEAD))

    def load_head(self, folder: str | Path) -> None:
        """Loads the head from a folder written by :meth:`save_pretrained`. Does nothing if the folder has none."""
        from safetensors.torch import load_file

        if (Path(folder) / _HEAD).is_file():
            self.head.load_state_dict(load_file(str(Path(folder) / _HEAD)))
