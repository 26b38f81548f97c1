"""The task from docstrings: real, balanced, reproducible, with disjoint splits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from deltasam.lab.tasks import Data, DataError, DataSource, find_task

TASK = find_task("docstrings")


@pytest.fixture(scope="module")
def data() -> Data:
    return TASK.load(DataSource())


def test_size_and_balance(data: Data) -> None:
    sizes = {split: len(rows) for split, rows in data.splits.items()}
    assert 2000 < sizes["train"] < 8000
    assert 0.15 < sizes["validation"] / sum(sizes.values()) < 0.25
    for rows in data.splits.values():
        share = Counter(row["label"] for row in rows)[1] / len(rows)
        assert 0.45 < share < 0.55


def test_splits_share_no_function_and_few_descriptions(data: Data) -> None:
    train, validation = data.splits["train"], data.splits["validation"]
    assert not {row["sentence1"] for row in train} & {row["sentence1"] for row in validation}
    seen = {row["sentence2"] for row in train}
    assert sum(row["sentence2"] in seen for row in validation) / len(validation) < 0.2  # "Return a string." is common


def test_descriptions_are_the_real_ones(data: Data) -> None:
    import gettext
    import inspect
    import textwrap

    rows = {row["sentence1"]: row for split in data.splits.values() for row in split}
    checked = 0
    for module in (textwrap, inspect, gettext):
        for name, function in vars(module).items():
            row = rows.get(f"{module.__name__}.{name}")
            if row is not None and callable(function) and function.__module__ == module.__name__:
                described = " ".join((function.__doc__ or "").split())
                assert described.startswith(row["sentence2"]) == bool(row["label"]), row
                checked += 1
    assert checked > 10


def test_mismatch_comes_from_the_same_module(data: Data) -> None:
    own = {
        row["sentence2"]: row["sentence1"].split(".")[0]
        for rows in data.splits.values()
        for row in rows
        if row["label"]
    }
    wrong = [row for row in data.splits["train"] if not row["label"] and row["sentence2"] in own]
    same = sum(own[row["sentence2"]] == row["sentence1"].split(".")[0] for row in wrong)
    assert same / len(wrong) > 0.9


def test_parts_of_splits(data: Data) -> None:
    parts = replace(TASK, train_split="train[:90%]", eval_split="train[90%:]").load(DataSource())
    assert parts.splits["train[:90%]"] + parts.splits["train[90%:]"] == data.splits["train"]


def test_errors() -> None:
    with pytest.raises(DataError, match=r"no split 'test', only train, validation"):
        TASK.load(DataSource(), ["test"])
    with pytest.raises(ValueError, match=r"label_noise=1.5"):
        replace(TASK, label_noise=1.5)
