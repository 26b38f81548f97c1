"""The task from packages: real descriptions, disjoint splits, every class in both."""

from __future__ import annotations

import inspect
import logging
from collections import Counter

import pytest

from deltasam.lab.tasks import Data, DataError, DataSource, find_task

TASK = find_task("packages-prompt")


@pytest.fixture(scope="module")
def data() -> Data:
    return TASK.load(DataSource())


def test_size_balance_and_disjoint_splits(data: Data) -> None:
    sizes = {split: len(rows) for split, rows in data.splits.items()}
    assert 500 < sizes["train"] < 2000
    assert 0.15 < sizes["validation"] / sum(sizes.values()) < 0.25
    for rows in data.splits.values():
        counts = Counter(row["label"] for row in rows)
        assert set(counts) == set(range(6))
        assert max(counts.values()) < 0.4 * len(rows)
    texts = [row["text"] for rows in data.splits.values() for row in rows]
    assert len(texts) == len(set(texts))


def test_descriptions_are_the_real_ones(data: Data) -> None:
    label = TASK.classes.index("logging")
    found = {row["text"] for rows in data.splits.values() for row in rows if row["label"] == label}
    docstrings = [" ".join((inspect.getdoc(f) or "").split()) for f in vars(logging.Logger).values() if callable(f)]
    assert sum(any(text.startswith(description) for description in found) for text in docstrings if text) > 5


def test_parts_prompts_and_errors(data: Data) -> None:
    parts = TASK.load(DataSource(), ["train[:50%]", "train[50%:]"])
    assert parts.splits["train[:50%]"] + parts.splits["train[50%:]"] == data.splits["train"]
    assert TASK.prompt({"text": "Close the loop."}) == "Close the loop.\nTopic:"
    with pytest.raises(DataError, match=r"no split 'test', only train, validation"):
        TASK.load(DataSource(), ["test"])
