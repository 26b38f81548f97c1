"""The data of a run: classes inferred from all rows, and changed rows detected."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.experiments import ConfigError, RunConfig, changed_runs, load_run, run
from deltasam.lab.tasks import DataError
from helpers.pretrained import bert_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


def write(path: Path, seed: int = 0) -> str:
    rows = [f"{'the cat sat' if (i + seed) % 3 else 'a dog ran'} {i},{'abc'[i % 3]}" for i in range(12)]
    path.write_text("\n".join(["text,label", *rows]))
    return str(path)


@pytest.fixture
def one(tmp_path: Path) -> RunConfig:
    """Three classes, inferred from the rows."""
    files = {name: write(tmp_path / f"{name}.csv") for name in ("train", "validation")}
    task = {"name": "classification", "files": files, "text": "text", "label": "label", "max_length": 16}
    sections: dict[str, Any] = {"schedule": {"steps": 4}, "batch": {"size": 4}, "checkpoint_every": 2}
    return RunConfig.from_plain({"task": task, "model": str(bert_folder(tmp_path / "bert")), **sections})


def test_classes_are_inferred_from_all_rows_of_the_run(one: RunConfig, tmp_path: Path) -> None:
    run(one, tmp_path / "run")
    _, loaded = load_run(tmp_path / "run", split="train", rows=2)
    assert len(loaded.rows) == 2
    assert loaded.model.config.num_labels == 3


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_is_not_evaluated_with_other_classes(one: RunConfig, tmp_path: Path, lora: bool) -> None:
    """Those of the training file may have changed since, also to as many others."""
    if lora:
        one = RunConfig.from_plain({**one.to_plain(), "model": {"path": one.model.path, "lora": 2}})
    run(one, tmp_path / "run")
    for file in tmp_path.glob("*.csv"):
        file.write_text(file.read_text().replace(",a\n", ",z\n"))
    with pytest.raises(DataError, match=r"b, c, z, .* a, b, c"):
        load_run(tmp_path / "run")


def test_rows_that_changed_after_the_run(one: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = run(one, tmp_path / "run")
    caplog.clear()
    assert run(one, tmp_path / "run") == first
    assert not caplog.records
    write(tmp_path / "train.csv", seed=1)
    with caplog.at_level(logging.WARNING):
        assert run(one, tmp_path / "run") == first
    (message,) = [record.getMessage() for record in caplog.records]
    assert "train.csv) have changed since the run in" in message
    assert "--output" in message


def test_rows_that_changed_after_some_runs(one: RunConfig, tmp_path: Path) -> None:
    runs = []
    for seed, stress in ((1, {}), (2, {}), (1, {"label_noise": 0.3}), (2, {"label_noise": 0.3})):
        if seed == 2:
            write(tmp_path / "train.csv", seed=1)
        task = dataclasses.replace(one.task, **stress)
        config = dataclasses.replace(one, task=task, seed=seed)
        runs.append((config, tmp_path / config.run_name))
        run(*runs[-1], keep_weights=False)
        write(tmp_path / "train.csv")
    assert list(changed_runs(runs)) == [runs[1][1], runs[3][1]]
    assert "train.csv" in changed_runs(runs)[runs[1][1]]
    (runs[1][1] / "result.json").unlink()
    assert list(changed_runs(runs)) == [runs[3][1]]  # an unfinished run is not continued


def test_a_run_does_not_go_on_with_other_rows(one: RunConfig, tmp_path: Path) -> None:
    def stop(step: int, *_: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(one, tmp_path / "run", watch=stop)
    write(tmp_path / "validation.csv", seed=1)
    with pytest.raises(ConfigError, match=r"validation.csv\) have changed since the run in .* was started"):
        run(one, tmp_path / "run")
    write(tmp_path / "validation.csv")
    assert run(one, tmp_path / "run").steps == 4


def test_a_run_finds_its_own_files_from_any_folder(
    one: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: f"{name}.csv" for name in ("train", "validation")}
    here = dataclasses.replace(one, task=dataclasses.replace(one.task, files=files))
    monkeypatch.chdir(tmp_path)
    run(here, tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(elsewhere / "validation.csv", seed=1)  # of the same name, but not of the run
    monkeypatch.chdir(elsewhere)
    config, loaded = load_run(tmp_path / "run")
    assert config == here
    assert loaded.rows[0]["text"] == "a dog ran 0"
    shutil.move(tmp_path / "train.csv", elsewhere)  # moved with the user
    assert len(load_run(tmp_path / "run", split="train")[1].rows) == 12
    (elsewhere / "train.csv").unlink()
    with pytest.raises(DataError, match=rf"train.csv: there is no such file in {elsewhere}"):
        load_run(tmp_path / "run")
