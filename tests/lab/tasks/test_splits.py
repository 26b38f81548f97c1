"""Parts of splits, models in DELTASAM_MODELS, and padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltasam.lab.tasks import DataError, DataSource, find_model, find_task, load_tokenizer
from deltasam.lab.tasks._encoding import encoded, padded
from helpers.pretrained import bert_folder


@pytest.fixture
def source(tmp_path: Path) -> DataSource:
    (tmp_path / "cola").mkdir()
    rows = "\n".join(f'{{"sentence": "row {i}", "label": {i % 2}}}' for i in range(21))
    (tmp_path / "cola" / "train.jsonl").write_text(rows + "\n")
    return DataSource.find(str(tmp_path))


def numbers(source: DataSource, split: str) -> list[int]:
    return [int(row["sentence"].split()[1]) for row in find_task("cola").read(source, split).rows]


def test_the_two_parts_of_a_split_are_the_whole(source: DataSource) -> None:
    assert numbers(source, "train[:90%]") + numbers(source, "train[90%:]") == list(range(21))
    assert numbers(source, "train[3:7]") == [3, 4, 5, 6]
    assert numbers(source, "train[:100]") == list(range(21))
    assert find_task("cola").read(source, "train[90%:]").origin.endswith("[19:21]")


def test_an_empty_part_raises(source: DataSource) -> None:
    with pytest.raises(DataError, match=r"train\[30:\].*has no rows.*has 21"):
        find_task("cola").read(source, "train[30:]")


def test_models_are_found_in_the_folder_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bert_folder(tmp_path / "models" / "small")
    with pytest.raises(DataError, match="'small'"):
        find_model("small")
    monkeypatch.setenv("DELTASAM_MODELS", str(tmp_path / "models"))
    assert find_model("small") == str(folder)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [None, 24])
def test_batches_are_padded_as_the_tokenizer_pads_them(tmp_path: Path, side: str, length: int | None) -> None:
    tokenizer = load_tokenizer(str(bert_folder(tmp_path / "bert")))
    tokenizer.padding_side = side
    texts = [["a", "get the cat", "the dog ran to the cat"], ["the cat", "x", "y"]]
    items = [{**item, "labels": i} for i, item in enumerate(encoded(tokenizer, texts, 20))]
    how = {"padding": True} if length is None else {"padding": "max_length", "max_length": length}
    expected = tokenizer.pad(items, return_tensors="pt", **how)
    found = padded(items, tokenizer, length)
    assert set(found) == set(expected)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name])
