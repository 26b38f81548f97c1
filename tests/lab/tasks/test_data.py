"""Data from local folders and files. Every error in the data raises before training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.tasks import DataError, DataSource, SentenceTask, find_task

ROWS = [{"sentence1": "a b", "sentence2": "c", "label": i % 2} for i in range(6)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "mrpc/train.jsonl.gz", ROWS)
    write_rows(tmp_path / "mrpc/validation.jsonl.gz", ROWS[:4])
    return tmp_path


def test_local_layout(folder: Path) -> None:
    data = find_task("mrpc").load(DataSource.find(folder))
    assert {split: len(rows) for split, rows in data.splits.items()} == {"train": 6, "validation": 4}
    assert data.origins == {"train": "mrpc/train.jsonl.gz", "validation": "mrpc/validation.jsonl.gz"}
    assert data.splits["train"][1] == {"sentence1": "a b", "sentence2": "c", "label": 1}
    assert data.classes == ("not_equivalent", "equivalent")


def test_environment_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASAM_DATA", str(folder))
    assert DataSource.find(None).folder == folder
    monkeypatch.delenv("DELTASAM_DATA")
    assert DataSource.find(None).folder is None


def test_a_subset_file_is_used_for_its_split(folder: Path) -> None:
    (folder / "mrpc/train.jsonl.gz").rename(folder / "mrpc/train_subset9k.jsonl.gz")
    data = find_task("mrpc").load(DataSource.find(folder))
    assert data.origins["train"] == "mrpc/train_subset9k.jsonl.gz"
    write_rows(folder / "mrpc/train_other.jsonl.gz", ROWS)
    with pytest.raises(DataError, match=r"several subsets.*train_other.*train_subset9k"):
        find_task("mrpc").load(DataSource.find(folder))


@pytest.mark.parametrize("other", ["train.backup.jsonl", "train.0.jsonl.gz", "train.old.csv"])
def test_a_file_of_another_name_is_not_the_split(folder: Path, other: str) -> None:
    write_rows(folder / "mrpc" / other, [])
    assert find_task("mrpc").load(DataSource.find(folder)).origins["train"] == "mrpc/train.jsonl.gz"
    (folder / "mrpc/train.jsonl.gz").unlink()
    with pytest.raises(DataError, match=rf"there is no split 'train' in .*{other}"):
        find_task("mrpc").load(DataSource.find(folder))


def test_two_files_of_one_split_raise(folder: Path) -> None:
    write_rows(folder / "mrpc/validation.jsonl", ROWS)
    with pytest.raises(DataError, match=r"'validation' is in several files, validation.jsonl.gz, validation.jsonl"):
        find_task("mrpc").load(DataSource.find(folder))


def test_sample_is_fixed(folder: Path) -> None:
    rows = [{"sentence1": str(i), "sentence2": "x", "label": 0} for i in range(50)]
    write_rows(folder / "mrpc/train.jsonl.gz", rows)
    task = SentenceTask(**{**vars(find_task("mrpc")), "train_rows": 7})
    first, second = (task.load(DataSource.find(folder)).splits["train"] for _ in range(2))
    assert first == second
    assert len(first) == 7
    places = [int(row["sentence1"]) for row in first]
    assert places == sorted(set(places))  # in the order of the file, without duplicates
    assert max(places) > 20  # not only the first rows


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "csv", "tsv", "parquet"])
def test_files_and_columns_of_the_user(tmp_path: Path, ending: str) -> None:
    rows = [{"review": f"text, {i}", "stars": ["bad", "good"][i % 2]} for i in range(4)]
    path = tmp_path / f"train.{ending}"
    if ending.startswith("jsonl"):
        write_rows(path, rows)
    else:
        import pandas as pd

        frame = pd.DataFrame(rows)
        if ending == "parquet":
            frame.to_parquet(path)
        else:
            frame.to_csv(path, index=False, sep="\t" if ending == "tsv" else ",")
    files = {"train": str(path), "validation": str(path)}
    data = SentenceTask(name="classification", text=("review",), label="stars", files=files).load(DataSource())
    assert data.classes == ("bad", "good")
    assert data.splits["train"][:2] == [{"review": "text, 0", "label": 0}, {"review": "text, 1", "label": 1}]


def test_regression_labels_from_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\nx,1.5\ny,-2\n")
    task = SentenceTask(name="regression", kind="regression", files={"train": str(path)}, eval_split="train")
    assert [row["label"] for row in task.load(DataSource()).splits["train"]] == [1.5, -2.0]


def _broken(rows: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    return [*rows[:2], {**rows[2], **changes}, *rows[3:]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"validation.jsonl.gz: the split is empty"),
        (
            [{"sentence1": "a", "sentence": "b", "label": 0}],
            r"no column 'sentence2' in row 0; did you mean 'sentence.?'",
        ),
        (_broken(ROWS, label=2), r"column 'label' in row 2: label 2 is out of range, the 2 classes are 0..1"),
        (_broken(ROWS, label=0.5), r"row 2: label 0.5 is out of range"),
        (_broken(ROWS, label=-1), r"row 2: the label is hidden"),
        (_broken(ROWS, label=float("nan")), r"row 2: the label is missing"),
        (_broken(ROWS, label="maybe"), r"row 2: label 'maybe' is none of the classes not_equivalent, equivalent"),
        (_broken(ROWS, sentence2=None), r"column 'sentence2' is missing \(NaN\) in row 2"),
        (_broken(ROWS, sentence1=float("nan")), r"column 'sentence1' is missing \(NaN\) in row 2"),
        (_broken(ROWS, sentence1=7), r"column 'sentence1' in row 2 must be text, not 7"),
    ],
)
def test_wrong_rows(folder: Path, rows: list[dict[str, Any]], message: str) -> None:
    write_rows(folder / "mrpc/validation.jsonl.gz", rows)
    with pytest.raises(DataError, match=message):
        find_task("mrpc").load(DataSource.find(folder))


def test_wrong_scores(folder: Path) -> None:
    for bad in (float("nan"), float("inf"), "high", None):
        write_rows(folder / "stsb/train.jsonl.gz", [{"sentence1": "a", "sentence2": "b", "label": bad}])
        with pytest.raises(DataError, match=r"row 0 must be a finite number"):
            find_task("stsb").load(DataSource.find(folder), ["train"])


def test_missing_files_and_names(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rte: there is no folder .* has mrpc"):
        find_task("rte").load(DataSource.find(folder))
    with pytest.raises(DataError, match=r"no split 'test' in .*train.jsonl.gz, validation.jsonl.gz"):
        find_task("mrpc").load(DataSource.find(folder), ["test"])
    with pytest.raises(DataError, match=r"--data: the folder .* does not exist"):
        DataSource.find(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"there is no data: .*task.files.train"):
        find_task("classification").load(DataSource())
    with pytest.raises(DataError, match=r"task.files.validation"):
        SentenceTask(name="x", files={"train": str(folder / "mrpc/train.jsonl.gz")}).load(DataSource())
    with pytest.raises(ValueError, match=r"did you mean mrpc"):
        find_task("mrcp")


def test_offline_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE.*--data or DELTASAM_DATA"):
        find_task("mrpc").load(DataSource())


def test_damaged_files(folder: Path) -> None:
    (folder / "mrpc/train.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"cannot be read"):
        find_task("mrpc").load(DataSource.find(folder))
    (folder / "mrpc/train.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\nnonsense\n'))
    with pytest.raises(DataError, match=r"line 2: not JSON"):
        find_task("mrpc").load(DataSource.find(folder))


@pytest.mark.data
def test_every_glue_task_loads(shared: Path) -> None:
    from deltasam.lab.tasks import GLUE

    sizes = {"mrpc": (3668, 408), "rte": (2490, 277), "cola": (8551, 1043), "stsb": (5749, 1500)}
    for name in [*sizes, "qnli", "mnli", "qqp"]:
        data = GLUE[name].load(DataSource.find(shared / "data"))
        found = tuple(len(rows) for rows in data.splits.values())
        assert found == sizes.get(name, found)
        assert min(found) >= 1000 or name in sizes


@pytest.mark.data
def test_hidden_labels_raise(shared: Path) -> None:
    with pytest.raises(DataError, match=r"this split has no public labels"):
        find_task("rte").load(DataSource.find(shared / "data"), ["test"])
