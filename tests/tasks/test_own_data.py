"""Data of the user's own: labels keep the class they were written with, and bad cells are told, not trained on."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltasam.tasks import DataError, DataSource, MirrorTask, SentenceTask, Seq2SeqTask, find_task


def _task(path: Path, **options: Any) -> SentenceTask:
    files = {"train": str(path), "validation": str(path)}
    return SentenceTask(name="own", files=files, **options)


def _json_lines(path: Path, labels: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": f"text {i}", "label": v}) + "\n" for i, v in enumerate(labels)))
    return path


def _names(task: SentenceTask) -> list[str]:
    data = task.load(DataSource())
    return [data.classes[row["label"]] for row in data.splits["train"]]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([1, 2, 3, 4, 5, "n/a"], ["1", "2", "3", "4", "5", "n/a"]),
        ([1, 1.0, "1", "other"], ["1", "1", "1", "other"]),
        ([0.5, 1.5, 0.5], ["0.5", "1.5", "0.5"]),
        ([True, False, "unknown"], ["True", "False", "unknown"]),
        ([2, 0, 1], ["2", "0", "1"]),
        (["2", "0", 1.0], ["2", "0", "1"]),
    ],
)
def test_labels_keep_their_names(tmp_path: Path, labels: list[Any], names: list[str]) -> None:
    assert _names(_task(_json_lines(tmp_path / "a.jsonl", labels))) == names


def test_a_number_is_no_place_among_names_that_were_found(tmp_path: Path) -> None:
    train = _json_lines(tmp_path / "train.jsonl", ["bad", "good"])
    other = _json_lines(tmp_path / "validation.jsonl", ["good", 0])
    task = SentenceTask(name="own", files={"train": str(train), "validation": str(other)})
    with pytest.raises(DataError, match=r"validation.jsonl: column 'label' in row 1: label 0 is none of .* bad, good"):
        task.load(DataSource())
    assert replace(task, classes=("bad", "good")).load(DataSource()).splits["validation"][1]["label"] == 0


def test_named_classes_that_are_numbers_are_names(tmp_path: Path) -> None:
    path = _json_lines(tmp_path / "a.jsonl", [1, 2, 3])
    assert _names(_task(path, classes=("1", "2", "3"))) == ["1", "2", "3"]
    with pytest.raises(DataError, match=r"row 0: label 0 is none of the classes 1, 2, 3"):
        _task(_json_lines(path, [0, 1]), classes=("1", "2", "3")).load(DataSource())


@pytest.mark.parametrize("label", [["a", "b"], {"a": 1}])
@pytest.mark.parametrize("classes", [(), ("a", "b")])
def test_a_list_is_no_label(tmp_path: Path, label: object, classes: tuple[str, ...]) -> None:
    path = _json_lines(tmp_path / "a.jsonl", ["a", label])
    with pytest.raises(DataError, match=r"a.jsonl: column 'label' in row 1: a label is one name or number, not [\[{]"):
        _task(path, classes=classes).load(DataSource())


def test_a_number_far_beyond_the_rows_is_no_class(tmp_path: Path) -> None:
    path = _json_lines(tmp_path / "a.jsonl", [0, 1, 3_000_002, 1])
    with pytest.raises(DataError, match=r"a.jsonl: column 'label' in row 2: label 3000002 .* 3000003 .*task.label"):
        _task(path).load(DataSource())
    assert len(_task(_json_lines(path, [0, 1, 150, 1])).load(DataSource()).classes) == 151


def test_negative_labels_are_told(tmp_path: Path) -> None:
    for labels in ([-1, -1], [-1, 1]):
        with pytest.raises(DataError, match=r"row 0: the label is hidden \(-1\).* classes of your own from 0"):
            _task(_json_lines(tmp_path / "a.jsonl", labels)).load(DataSource())


@pytest.mark.parametrize("cell", ["nan", "NaN", ""])
def test_a_label_that_is_not_there_is_no_class(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"text,label\nx,1\ny,{cell}\nz,0\n")
    with pytest.raises(DataError, match=r"a.csv: column 'label' in row 1: the label is missing; drop such rows"):
        _task(path).load(DataSource())


def test_a_class_may_be_called_nan_if_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\nx,nan\ny,roti\n")
    assert _names(_task(path, classes=("nan", "roti"))) == ["nan", "roti"]


@pytest.mark.parametrize("cell", ["", "  "])
def test_an_empty_text_is_told(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"text,label\nx,1\n{cell},0\n")
    with pytest.raises(DataError, match=r"a.csv: column 'text' is empty in row 1; drop such rows"):
        _task(path).load(DataSource())
    files = {"train": str(path), "validation": str(path)}
    with pytest.raises(DataError, match=r"a.csv: column 'text' is empty in row 1"):
        Seq2SeqTask(name="own", files=files, source="text", target="label").load(DataSource())
    with pytest.raises(DataError, match=r"a.csv: column 'text' is empty in row 1"):
        MirrorTask(name="own", files=files, train_split="train", text="text").load(DataSource(), ["train"])


def test_standard_sets_are_taken_as_they_were_published() -> None:
    row = {"question1": "why?", "question2": "", "label": 0}  # QQP has such rows
    assert find_task("qqp").check({"train": [row]}, {}).splits["train"] == [row]


@pytest.mark.parametrize("column", ["text", "label"])
def test_half_a_character_is_told(tmp_path: Path, column: str) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": "fine", "label": "a"}, {"text": "fine", "label": "b", column: "oh \ud83d no"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=rf"a.jsonl: column '{column}' in row 1 .* half a character .*ud83d.* 3"):
        _task(path).load(DataSource())


def test_long_cells_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"text,label\n{'long ' * 40_000},1\nshort,0\n")
    limit = csv.field_size_limit()
    assert len(_task(path).load(DataSource()).splits["train"][0]["text"]) == 200_000
    assert csv.field_size_limit() == limit
