"""Padding of batches to few lengths, so that few graphs are enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F


class PadToBuckets:
    """Wraps a collator: pads the sequences of a batch on the right, to the next bucket or the next multiple.

    Every tensor of two or more dimensions whose second one is as long as ``input_ids`` is padded with its own value:
    ``input_ids`` with ``pad_token_id``, token labels with -100, everything else, masks included, with 0. Padding that
    the attention mask covers does not change the losses. Floating-point ``labels`` have one entry per class, and stay.

    Args:
        collate: The collator to wrap, for example ``DataCollatorWithPadding(tokenizer)``.
        pad_token_id: What ``input_ids`` are padded with.
        multiple: Pad to the next multiple of this; or
        buckets: pad to the smallest of these lengths that is long enough (a longer batch goes to the next multiple of
            the last one).
        values: Padding values of further keys.

    Example:
        >>> import torch
        >>> collate = PadToBuckets(lambda rows: {"input_ids": torch.tensor(rows)}, pad_token_id=9, multiple=4)
        >>> collate([[1, 2, 3, 4, 5]])
        {'input_ids': tensor([[1, 2, 3, 4, 5, 9, 9, 9]])}
    """

    def __init__(
        self,
        collate: Callable[[Any], Any],
        *,
        pad_token_id: int,
        multiple: int = 32,
        buckets: Sequence[int] | None = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        if multiple < 1:
            raise ValueError(f"multiple={multiple!r} must be at least 1")
        if buckets is not None and (not buckets or sorted(set(buckets)) != list(buckets) or buckets[0] < 1):
            raise ValueError(f"buckets={buckets!r} must be lengths in rising order")
        self.collate = collate
        self._values = {"input_ids": pad_token_id, "labels": -100, **(values or {})}
        self._multiple = multiple
        self._buckets = tuple(buckets or ())

    def length(self, longest: int) -> int:
        """The length a batch is padded to."""
        for bucket in self._buckets:
            if longest <= bucket:
                return bucket
        multiple = self._buckets[-1] if self._buckets else self._multiple
        return -(-longest // multiple) * multiple

    def __call__(self, rows: Any) -> dict[str, Any]:
        """Collates, then pads."""
        batch = self.collate(rows)
        if "input_ids" not in batch:
            raise ValueError(f"PadToBuckets pads batches with 'input_ids'; this one has {sorted(batch)}")
        longest = batch["input_ids"].shape[1]
        more = self.length(longest) - longest

        def padded(key: str, value: Any) -> Any:
            if not more or not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != longest:
                return value
            if key == "labels" and value.is_floating_point():
                return value
            tail = [0] * (2 * (value.ndim - 2)) + [0, more]
            return F.pad(value, tail, value=self._values.get(key, 0))

        return {key: padded(key, value) for key, value in batch.items()}
