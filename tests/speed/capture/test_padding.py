"""Padding to few shapes changes no loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasam.speed.capture import PadToBuckets


def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [9] * (longest - len(row)) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 9).long(),
        "labels": torch.zeros(len(rows), dtype=torch.long),
        "tags": ids.clone(),
    }


def test_every_tensor_along_the_sequence_is_padded_with_its_own_value() -> None:
    batch = PadToBuckets(collate, pad_token_id=9, multiple=4, values={"tags": -100})([[1, 2, 3, 4, 5], [6]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9], [6] + [9] * 7]
    assert batch["attention_mask"].sum().item() == 6
    assert batch["labels"].shape == (2,)
    assert batch["tags"][0].tolist()[5:] == [-100] * 3


def test_labels_of_classes_are_not_padded() -> None:
    """Five classes and five tokens: the zeros and ones of multi-label classification are floats."""
    labels = torch.eye(5)[:2]
    padding = PadToBuckets(lambda rows: {**collate(rows), "labels": labels}, pad_token_id=9, multiple=4)
    batch = padding([[1, 2, 3, 4, 5], [6]])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["labels"] is labels


@given(st.integers(1, 600))
def test_lengths(longest: int) -> None:
    by_multiple = PadToBuckets(collate, pad_token_id=0, multiple=32).length(longest)
    assert by_multiple >= longest
    assert by_multiple % 32 == 0
    assert by_multiple - longest < 32
    by_bucket = PadToBuckets(collate, pad_token_id=0, buckets=[16, 64, 128]).length(longest)
    assert by_bucket >= longest
    assert by_bucket in (16, 64) or by_bucket % 128 == 0


@pytest.mark.parametrize("options", [{"multiple": 0}, {"buckets": []}, {"buckets": [32, 16]}, {"buckets": [0, 4]}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        PadToBuckets(collate, pad_token_id=0, **options)


def test_a_batch_without_sequences() -> None:
    with pytest.raises(ValueError, match="input_ids"):
        PadToBuckets(lambda rows: {"x": torch.zeros(2, 3)}, pad_token_id=0)([])
