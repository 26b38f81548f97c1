"""Few rows, wrong labels and other sets as parts of a task."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deltasam.lab.experiments import RunConfig, load_run, prepare, run
from deltasam.lab.sweeps import record_weights
from deltasam.lab.tasks import DataError, DataSource, SentenceTask, find_task
from deltasam.lab.tasks._data import OtherSet
from deltasam.lab.tasks._other_sets import class_groups, other_logits
from deltasam.lab.tasks._stress import balanced, with_wrong_labels
from helpers.pretrained import bert_folder

ROWS = [{"text": f"number {i}", "label": int(i % 10 < 3)} for i in range(200)]  # 140 of class 0, 60 of class 1


@pytest.mark.parametrize(("count", "expected"), [(20, {0: 10, 1: 10}), (100, {0: 50, 1: 50}), (180, {0: 120, 1: 60})])
def test_a_sample_is_balanced_as_far_as_there_are_rows(count: int, expected: dict[int, int]) -> None:
    found = balanced(ROWS, count, seed=1)
    assert Counter(row["label"] for row in found) == expected
    assert found == [row for row in ROWS if row in found]  # in their order
    assert found != balanced(ROWS, count, seed=2)
    assert found == balanced(ROWS, count, seed=1)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_a_share_of_each_class_is_wrong(classes: int, share: float) -> None:
    rows = [{"text": str(i), "label": i % classes} for i in range(200)]
    found = with_wrong_labels(rows, share, range(classes), seed=3)
    wrong = [(old, new) for old, new in zip(rows, found, strict=True) if old["label"] != new["label"]]
    assert Counter(old["label"] for old, _ in wrong) == dict.fromkeys(range(classes), round(share * 200 / classes))
    assert all(new["clean_label"] == old["label"] for old, new in wrong)
    assert sum("clean_label" in row for row in found) == len(wrong)
    assert {new["label"] for _, new in wrong} == set(range(classes))
    assert rows[0] == {"text": "0", "label": 0}  # not changed in place


def test_stress_is_of_the_training_rows_and_drawn_by_the_seed() -> None:
    task = replace(find_task("docstrings"), rows=40, label_noise=0.2)
    data = task.load(DataSource())
    one, same, other = (task.stressed(data, seed) for seed in (1, 1, 2))
    assert len(one.splits["train"]) == 40
    assert sum("clean_label" in row for row in one.splits["train"]) == 8
    assert one.splits["validation"] == data.splits["validation"]
    assert one.splits == same.splits
    assert one.splits["train"] != other.splits["train"]
    plain = find_task("docstrings")
    assert plain.stressed(data, 1).splits == data.splits


@pytest.mark.parametrize("name", ["docstrings", "docstrings-prompt"])
def test_the_offline_task_has_this_share_of_wrong_labels_and_knows_the_right_ones(name: str) -> None:
    clean = find_task(name).load(DataSource()).splits["train"]
    noisy = replace(find_task(name), label_noise=0.2)
    found = noisy.stressed(noisy.load(DataSource()), 1).splits["train"]
    wrong = [(old, new) for old, new in zip(clean, found, strict=True) if old["label"] != new["label"]]
    of_class = Counter(row["label"] for row in clean)
    assert Counter(old["label"] for old, _ in wrong) == {label: round(0.2 * n) for label, n in of_class.items()}
    assert [new["clean_label"] for _, new in wrong] == [old["label"] for old, _ in wrong]
    assert sum("clean_label" in row for row in found) == len(wrong)


def test_ids_of_earlier_runs_stay() -> None:
    given = {"task": {"name": "mrpc"}, "model": "bert-base-cased"}
    earlier = RunConfig.from_plain(given).run_id
    assert earlier == "1d9c2e63ac95"
    assert RunConfig.from_plain({**given, "task": {"name": "docstrings"}}).run_id == "c17d5fffacb5"
    for option in ({"rows": 250}, {"label_noise": 0.2}, {"evaluate_on": ["qqp"]}, {"bits": []}):
        assert RunConfig.from_plain({**given, "task": {"name": "mrpc", **option}}).run_id != earlier


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_noise": 1.5}, "label_noise=1.5"),
        ({"rows": 0}, "rows=0"),
        ({"bits": (40,)}, "bits=40"),
        ({"kind": "regression", "label_noise": 0.1}, "needs classes"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SentenceTask(name="own", **options)  # type: ignore[arg-type]


def _table(path: Path, rows: list[dict[str, object]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> DataSource:
    pairs = {"premise": "a name", "hypothesis": "a file"}
    _table(tmp_path / "mnli" / "train.jsonl", [{**pairs, "label": i % 3} for i in range(9)])
    _table(tmp_path / "mnli" / "validation_matched.jsonl", [{**pairs, "label": i % 3} for i in range(6)])
    _table(tmp_path / "mnli" / "validation_mismatched.jsonl", [{**pairs, "label": 1} for _ in range(4)])
    _table(
        tmp_path / "rte" / "validation.jsonl", [{"sentence1": "a", "sentence2": "b", "label": i % 2} for i in range(5)]
    )
    _table(tmp_path / "sst2" / "validation.jsonl", [{"sentence": "a", "label": 1}])
    return DataSource(tmp_path)


def test_other_sets_have_the_columns_of_the_task_and_their_own_classes(source: DataSource, tmp_path: Path) -> None:
    own = _table(tmp_path / "own.jsonl", [{"premise": "x", "hypothesis": "y", "label": 2}])
    task = replace(find_task("mnli"), evaluate_on=("mnli:validation_mismatched", "rte", own))
    others = task.load(source).others
    assert [len(other.rows) for other in others.values()] == [4, 5, 1]
    assert others["rte"].rows[1] == {"premise": "a", "hypothesis": "b", "label": 1}
    p = torch.tensor([[0.5, 0.3, 0.2]])
    torch.testing.assert_close(
        other_logits(others["rte"], p.log(), find_task("mnli").classes).exp(), torch.tensor([[0.5, 0.5]])
    )
    for name, message in (("sst2", "of 1 texts"), ("nothing", "not a task"), ("mirror", "not a task of sentences")):
        with pytest.raises(DataError, match=message):
            replace(task, evaluate_on=(name,)).load(source)


@pytest.mark.parametrize(("labels", "wrong"), [("12345", {1, 2, 3, 4, 5}), ("1", {0})])
def test_a_wrong_label_is_a_class_that_has_rows(labels: str, wrong: set[int], tmp_path: Path) -> None:
    path = _table(tmp_path / "own.jsonl", [{"text": "x", "label": int(label)} for label in labels * 20])
    task = SentenceTask(name="own", files={"train": path, "validation": path}, label_noise=1.0)
    rows = task.stressed(task.load(DataSource()), seed=1).splits["train"]
    assert {row["label"] for row in rows} == wrong
    assert all(row["label"] != row["clean_label"] for row in rows)


def test_the_labels_of_another_file_are_trained_classes(tmp_path: Path) -> None:
    def load(*labels: str) -> OtherSet:
        train, other = (
            _table(tmp_path / name, [{"text": "x", "label": label} for label in given])
            for name, given in (("train.jsonl", "abc"), ("other.jsonl", labels))
        )
        task = SentenceTask(name="own", files={"train": train, "validation": train}, evaluate_on=(other,))
        return task.load(DataSource()).others[other]

    for labels in ("ab", "cca", "b"):
        found = load(*labels)
        assert [found.classes[row["label"]] for row in found.rows] == list(labels)
        assert class_groups(("a", "b", "c"), found.classes) == [0, 1, 2]
    for labels in ("ade", "az", "1"):
        with pytest.raises(DataError):
            load(*labels)
    with pytest.raises(DataError):
        load()


@pytest.mark.parametrize(
    ("task", "other", "groups"),
    [("mrpc", "qqp", [0, 1]), ("mrpc", "rte", [1, 0]), ("qnli", "mrpc", [1, 0]), ("mnli", "rte", [0, 1, 1])],
)
def test_classes_with_not_in_their_name_go_together(task: str, other: str, groups: list[int]) -> None:
    assert class_groups(find_task(task).classes, find_task(other).classes) == groups  # type: ignore[attr-defined]


def test_a_model_of_scores_is_evaluated_on_other_scores(tmp_path: Path) -> None:
    pairs = [{"sentence1": f"a {'man' if i % 2 else 'dog'}", "sentence2": "a dog runs"} for i in range(8)]
    for split in ("train", "validation"):
        _table(tmp_path / "stsb" / f"{split}.jsonl", [{**pair, "label": i % 6} for i, pair in enumerate(pairs)])
    _table(tmp_path / "sickr" / "test.jsonl", [{**pair, "score": 1 + i % 5} for i, pair in enumerate(pairs)])
    task = {"name": "stsb", "evaluate_on": ["sickr"], "max_length": 24, "bits": []}
    given = {"task": task, "model": str(bert_folder(tmp_path / "bert")), "method": "erm", "schedule": {"steps": 1}}
    result = run(RunConfig.from_plain({**given, "batch": {"size": 4}, "data": str(tmp_path)}), tmp_path / "run")
    _, loaded = load_run(tmp_path / "run")
    rows = find_task("sickr").load(DataSource(tmp_path), ["test"]).splits["test"]
    assert [row["label"] for row in rows] == [1 + i % 5 for i in range(8)]
    expected = loaded.task.evaluate(loaded.model, loaded.tokenizer, rows)
    assert result.metrics["pearson_on_sickr"] == pytest.approx(expected["pearson"], abs=1e-6)
    assert not any("nll" in name for name in result.metrics)


def test_no_pair_of_sickr_is_in_the_training_set_of_stsb(shared: Path) -> None:
    source = DataSource(shared / "data")
    other, own = find_task("sickr"), find_task("stsb")
    pairs, known = (
        {frozenset((row["sentence1"], row["sentence2"])) for row in task.load(source, [split]).splits[split]}
        for task, split in ((other, "test"), (own, "train"))
    )
    assert len(pairs) > 4000
    assert not pairs & known


def test_weights_of_wrong_labels(source: DataSource, tmp_path: Path) -> None:
    config = RunConfig.from_plain(
        {
            "task": {"name": "mnli", "label_noise": 0.4, "max_length": 24, "bits": []},
            "model": str(bert_folder(tmp_path / "bert")),
            "method": "delta-sam",
            "schedule": {"steps": 1},
            "batch": {"size": 4},
            "data": str(source.folder),
        }
    )
    run(config, tmp_path / "run")
    _, loaded = load_run(tmp_path / "run", split="train")
    assert loaded.rows == prepare(config).train_rows  # with their wrong labels
    found = record_weights(tmp_path / "run", split="train", batch_size=3)
    wrong = found["wrong_labels"]
    assert wrong["count"] == 3  # one of each class
    assert (3 * wrong["weight"] + 6 * wrong["others"]) / 9 == pytest.approx(1)
    assert "wrong_labels" not in record_weights(tmp_path / "run")


def test_a_run_under_stress_holds_all_measurements(source: DataSource, tmp_path: Path) -> None:
    config = RunConfig.from_plain(
        {
            "task": {"name": "mnli", "rows": 6, "label_noise": 0.5, "evaluate_on": ["rte"], "max_length": 24},
            "model": str(bert_folder(tmp_path / "bert")),
            "schedule": {"steps": 2},
            "batch": {"size": 4},
            "data": str(source.folder),
            "seed": 5,
        }
    )
    result = run(config, tmp_path / "run", keep_weights=False)
    assert result.train_rows == 6
    assert sum("clean_label" in row for row in prepare(config).train_rows) == 3
    suffixes = ("", "_8bit", "_4bit", "_3bit", "_8bit_channel", "_4bit_channel", "_3bit_channel", "_on_rte")
    expected = {f"{name}{suffix}" for name in ("accuracy", "nll", "brier", "ece") for suffix in suffixes}
    expected |= {"loss", "ece_low", "ece_high", "temperature", "nll_scaled", "brier_scaled", "ece_scaled"}
    assert expected <= set(result.metrics)
    assert result.metrics["nll"] == pytest.approx(result.metrics["loss"])
    assert set(result.reliability) == {"evaluation", "scaled", "on_rte"}
    assert sum(count for count, _, _ in result.reliability["on_rte"]) == 5
    assert run(config, tmp_path / "run").metrics == result.metrics  # found, with the same rows
