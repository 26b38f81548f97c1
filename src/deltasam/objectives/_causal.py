"""Causal language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from deltasam.objectives._decoder import without_cache
from deltasam.objectives._tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class CausalLM(Tokens):
    r"""Cross-entropy of the next token, as one loss per sequence; the mean is Hugging Face's own loss.

    The labels are the tokens themselves, ``ignore_index`` where a token does not count; they are shifted here, the
    logits at t predict label t + 1, so the first label of a sequence is never a target.

    Arguments, reduction and errors are those of :class:`Tokens`.

    Example:
        >>> import torch
        >>> model, tokens = torch.nn.Embedding(7, 7), torch.tensor([[1, 2, 3], [4, 5, 6]])
        >>> CausalLM()(model, (tokens, tokens)).shape, CausalLM().items((tokens, tokens))
        (torch.Size([2]), tensor(4))
    """

    def inputs(self, model: nn.Module, batch: Any) -> Any:
        """The batch without its labels, and without a cache for generation."""
        return without_cache(model, super().inputs(model, batch))

    def targets(self, batch: Any) -> Tensor:
        """Labels moved by one position, so that they stand where they are predicted; nothing follows the last."""
        # Moving the labels and not the logits saves a copy of the logits.
        return F.pad(super().targets(batch), (0, 1), value=self.ignore_index)[:, 1:]
