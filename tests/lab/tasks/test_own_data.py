"""Data of the user: labels keep their class, and bad cells raise."""

from __future__ import annotations

import csv
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.tasks import DataError, DataSource, MirrorTask, SentenceTask, Seq2SeqTask, find_task


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


def test_a_number_is_not_an_index_of_inferred_classes(tmp_path: Path) -> None:
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
def test_a_list_as_a_label_raises(tmp_path: Path, label: object, classes: tuple[str, ...]) -> None:
    path = _json_lines(tmp_path / "a.jsonl", ["a", label])
    with pytest.raises(DataError, match=r"a.jsonl: column 'label' in row 1: a label is one name or number, not [\[{]"):
        _task(path, classes=classes).load(DataSource())


def test_a_label_much_larger_than_the_number_of_rows_raises(tmp_path: Path) -> None:
    path = _json_lines(tmp_path / "a.jsonl", [0, 1, 3_000_002, 1])
    with pytest.raises(DataError, match=r"a.jsonl: column 'label' .* 3000002, .* 3000003 .*task.label"):
        _task(path).load(DataSource())
    assert len(_task(_json_lines(path, [0, 1, 150, 1])).load(DataSource()).classes) == 151


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([f"{i * 0.37:.2f}" for i in range(40)], "40 classes for 40 rows.*--task regression"),
        ([f"comment {i}" for i in range(1100)], "1100 classes for 1100 rows.*task.label"),
    ],
)
def test_a_column_of_scores_or_texts_raises(tmp_path: Path, labels: list[Any], message: str) -> None:
    path = _json_lines(tmp_path / "rows.jsonl", labels)
    with pytest.raises(DataError, match=message):
        _task(path).load(DataSource())
    assert _names(_task(path, classes=tuple(labels))) == labels


@pytest.mark.parametrize("mark", [";", "|", "\t"])
def test_another_separator_raises(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "rows.csv"
    for quote in ("", '"'):
        path.write_text(f"{quote}text{quote}{mark}label\nfine, really{mark}1\ndull{mark}0\n")
        with pytest.raises(DataError, match=rf"rows.csv: .* separated by {re.escape(repr(mark))}.* commas, .*\.tsv"):
            _task(path).load(DataSource())


def test_labels_that_differ_in_spaces_raise(tmp_path: Path) -> None:
    path = _json_lines(tmp_path / "a.jsonl", ["good", "bad", "good "])
    with pytest.raises(DataError, match=r"a.jsonl: column 'label' .*'good' and 'good ', .*spaces.*task.classes"):
        _task(path).load(DataSource())
    assert _names(_task(path, classes=("bad", "good", "good "))) == ["good", "bad", "good "]


def test_negative_labels_raise(tmp_path: Path) -> None:
    for labels in ([-1, -1], [-1, 1]):
        with pytest.raises(DataError, match=r"row 0: the label is hidden \(-1\).* from 0"):
            _task(_json_lines(tmp_path / "a.jsonl", labels)).load(DataSource())


@pytest.mark.parametrize("label", ["nan", "NaN", "", "  ", None, float("nan")])
def test_a_missing_label_raises(tmp_path: Path, label: object) -> None:
    path = _json_lines(tmp_path / "a.jsonl", [1, label, 0])
    with pytest.raises(DataError, match=r"a.jsonl: column 'label' in row 1: the label is missing; drop such rows"):
        _task(path).load(DataSource())


def test_a_named_class_may_be_called_nan(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\nx,nan\ny,roti\n")
    assert _names(_task(path, classes=("nan", "roti"))) == ["nan", "roti"]


@pytest.mark.parametrize("cell", ["", "  "])
def test_an_empty_text_raises(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"text,label\nx,1\n{cell},0\n")
    with pytest.raises(DataError, match=r"a.csv: column 'text' is empty in row 1; drop such rows"):
        _task(path).load(DataSource())
    files = {"train": str(path), "validation": str(path)}
    with pytest.raises(DataError, match=r"a.csv: column 'text' is empty in row 1"):
        Seq2SeqTask(name="own", files=files, source="text", target="label").load(DataSource())
    with pytest.raises(DataError, match=r"a.csv: column 'text' is empty in row 1"):
        MirrorTask(name="own", files=files, train_split="train", text="text").load(DataSource(), ["train"])


def test_published_datasets_may_have_empty_texts() -> None:
    row = {"question1": "why?", "question2": "", "label": 0}  # QQP has such rows
    assert find_task("qqp").check({"train": [row]}, {}).splits["train"] == [row]


@pytest.mark.parametrize("column", ["text", "label"])
def test_a_lone_surrogate_raises(tmp_path: Path, column: str) -> None:
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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # an unquoted comma
        ("a.csv", "text,label\nfine,good\nfine, really,bad\n", r"a.csv: row 1 has 3 cells, the header 2.* in quotes"),
        ("a.tsv", "text\tlabel\nfine\tgood\nfine\treally\tbad\n", r"row 1 has 3 cells, the header 2.*'\\t'.* quotes"),
        # an unclosed quote
        ("a.csv", 'label,text\ngood,fine\nbad,"dull\ngood,fine\n', r"a.csv: a quote .*line 4.*jsonl"),
        ("a.tsv", 'label\ttext\ngood\tfine\nbad\t"Dull" is a word\n', r"a.tsv: a quote .*line 3.*jsonl"),
        ("a.csv", "text,label,text\nfine,good,dull\n", r"a.csv: .* a column twice"),
    ],
)
def test_a_damaged_table_raises(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        _task(path).load(DataSource())


def test_empty_cells_after_the_last_column_and_lines_in_quotes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,label\n"fine, ""really""\nfine",good,\ndull,bad,,\n')
    data = _task(path).load(DataSource())
    assert [row["text"] for row in data.splits["train"]] == ['fine, "really"\nfine', "dull"]
    assert data.classes == ("bad", "good")


def test_another_encoding_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("text,label\nfrançais,good\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a.csv: is not UTF-8 \(.* position 15.*\); save it as UTF-8, .*Excel"):
        _task(path).load(DataSource())


def test_a_damaged_archive_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    whole = gzip.compress(b"text,label\n" + b"fine,good\n" * 9)
    for number in range(10, len(whole)):  # after the header, which gzip checks itself
        path.write_bytes(whole[:number] + bytes([whole[number] ^ 255]) + whole[number + 1 :])
        with pytest.raises(DataError, match=r"a.csv.gz: cannot be read"):
            _task(path).load(DataSource())


def test_the_label_cannot_be_a_text() -> None:
    with pytest.raises(ValueError, match=r"task.text=\['text', 'stars'\].* the label, task.label='stars'"):
        SentenceTask(name="own", text=("text", "stars"), label="stars")
    with pytest.raises(ValueError, match=r"task.text=\['label'\].*rename"):
        SentenceTask(name="own", text=("label",), label="stars")


def test_duplicate_classes_raise() -> None:
    with pytest.raises(ValueError, match=r"task.classes=.*'good'.* duplicates"):
        SentenceTask(name="own", classes=("good", "bad", "good"))
