"""Packed batches: TRL's collator, with one row per document or with the number of documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from deltasam.objectives.packing import LENGTHS


class DocumentCollator:
    """Wraps TRL's padding-free collator.

    Args:
        collator: The collator, a dataclass with the field ``padding_free``.
        rows: Return one padded row per document. Otherwise the pack, with the lengths of its documents: a step then
            knows their number without asking the device.
        varlen: Keep what only attention kernels for packed rows read; it is different in every batch.
    """

    def __init__(self, collator: Any, *, rows: bool, varlen: bool = True) -> None:
        self.collator = replace(collator, padding_free=False) if rows else collator
        self.rows = rows
        self.varlen = varlen

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collates the examples of a batch."""
        if self.rows:
            documents = [document for example in examples for document in _documents(example)]
            # A single token has no target: TRL ignores the first label of a document.
            found: dict[str, Any] = self.collator([each for each in documents if _length(each) > 1] or documents)
            return found
        batch: dict[str, Any] = self.collator(examples)
        lengths = [length for example in examples for length in _lengths(example) if length > 1]
        batch[LENGTHS] = torch.tensor(lengths or [1])
        if not self.varlen:
            for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
                batch.pop(name, None)
        return batch


def _length(example: dict[str, Any]) -> int:
    return len(example["input_ids"])


def _lengths(example: dict[str, Any]) -> list[int]:
    return list(example.get("seq_lengths") or [_length(example)])


def _documents(example: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The documents of one packed example: every column with one entry per token is cut."""
    size, start = _length(example), 0
    columns = {name: value for name, value in example.items() if name != "seq_lengths"}
    for length in _lengths(example):
        part = slice(start, start + length)
        yield {
            name: value[part] if isinstance(value, (list, torch.Tensor)) and len(value) == size else value
            for name, value in columns.items()
        }
        start += length
