"""Documents that are packed into one row, end to end: their positions restart at 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LENGTHS = "document_lengths"
"""A column with the lengths of the documents (D,): its shape tells their number without asking the device."""

_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_PADDING = {"labels": -100}


def is_packed(batch: Any) -> bool:
    """Whether the rows of a batch hold documents end to end, as padding-free collators make them."""
    return isinstance(batch, Mapping) and "position_ids" in batch and "attention_mask" not in batch


def document_index(position_ids: Tensor) -> Tensor:
    """The number of the document of every token, (R, L).

    A document of one token has no target, so it is counted with the one before it; so is padding, whose positions are
    all 0.

    Example:
        >>> document_index(torch.tensor([[0, 1, 2, 0, 1, 0, 0]]))
        tensor([[0, 0, 0, 1, 1, 1, 1]])
    """
    following = F.pad(position_ids, (0, 1))[:, 1:]
    starts = (position_ids == 0) & (following != 0)
    return (starts.flatten().cumsum(0) - 1).clamp(min=0).view_as(position_ids)


def lengths_of(position_ids: Tensor) -> list[int]:
    """The lengths of all documents, also of those of one token, in order. Synchronises with the device.

    Example:
        >>> lengths_of(torch.tensor([[0, 1, 2, 0, 1, 0]]))
        [3, 2, 1]
    """
    starts = (position_ids == 0).flatten().nonzero().flatten().tolist()
    return [end - start for start, end in zip(starts, [*starts[1:], position_ids.numel()], strict=True)]


def unpacked(batch: Mapping[str, Any], *, pad_token_id: int = 0) -> dict[str, Any]:
    """A packed batch with one row per document, padded on the right: what methods that perturb instances need.

    The losses are the same: in a pack no document attends to another. Synchronises with the device.

    Args:
        batch: A mapping with ``input_ids`` and ``position_ids`` of shape (R, L), whose positions restart at 0.
        pad_token_id: What ``input_ids`` are padded with.

    Example:
        >>> pack = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
        >>> unpacked(pack)["input_ids"].tolist(), unpacked(pack)["attention_mask"].tolist()
        ([[5, 6, 7], [8, 9, 0]], [[1, 1, 1], [1, 1, 0]])
    """
    shape = batch["input_ids"].shape
    lengths = lengths_of(batch["position_ids"])
    keep = [k for k, length in enumerate(lengths) if length > 1] or [0]  # a single token has no target; or padding

    def rows(tensor: Tensor, value: int) -> Tensor:
        documents = torch.split(tensor.flatten(0, 1), lengths)
        return torch.nn.utils.rnn.pad_sequence([documents[k] for k in keep], batch_first=True, padding_value=value)

    found: dict[str, Any] = {}
    for name, value in batch.items():
        if name in ("position_ids", LENGTHS, *_VARLEN):
            continue
        if isinstance(value, Tensor) and value.shape[:2] == shape:
            found[name] = rows(value, pad_token_id if name == "input_ids" else _PADDING.get(name, 0))
        else:
            found[name] = value
    found["attention_mask"] = rows(torch.ones_like(batch["input_ids"]), 0)
    return found
