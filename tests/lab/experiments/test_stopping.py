"""A run that is told to stop: at once, with one checkpoint, and without a trace in what it evaluates."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.experiments import ConfigError, RunConfig, RunFolder, RunStoppedError, run
from deltasam.lab.experiments._folder import mark_complete
from deltasam.lab.experiments._trainer import RunTrainer
from helpers.pretrained import bert_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Two epochs of six updates, evaluated and saved after each."""
    task = {"name": "docstrings", "train_rows": 48, "eval_rows": 30, "max_length": 24}
    sections = {"optimizer": {"lr": 1e-3}, "schedule": {"epochs": 2}, "batch": {"size": 8}}
    return RunConfig.from_plain({"task": task, "model": str(bert_folder(tmp_path_factory.mktemp("m"))), **sections})


def told_to_stop(at: int) -> Callable[[int, int, dict[str, float]], None]:
    def watch(step: int, total: int, latest: dict[str, float]) -> None:
        if step == at - 1:  # the signal is seen at the end of the next update
            os.kill(os.getpid(), signal.SIGTERM)

    return watch


def evaluations(folder: Path) -> list[int]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry["step"] for entry in entries if "eval_accuracy" in entry]


@pytest.mark.parametrize(("at", "evaluated"), [(3, []), (6, [6]), (8, [6])])
def test_a_stop_evaluates_nothing_that_is_not_due(
    at: int, evaluated: list[int], one: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    save = RunTrainer._save_checkpoint
    monkeypatch.setattr(
        RunTrainer, "_save_checkpoint", lambda self, *args: (saved.append(self.state.global_step), save(self, *args))
    )
    with pytest.raises(RunStoppedError, match=f"after update {at} of 12"):
        run(one, tmp_path / "run", watch=told_to_stop(at))
    assert evaluations(tmp_path / "run") == evaluated
    assert saved == sorted({*evaluated, at}), "no checkpoint is written twice"
    assert (tmp_path / f"run/checkpoints/checkpoint-{at}/complete.json").is_file()
    result = run(one, tmp_path / "run")
    assert evaluations(tmp_path / "run") == [6, 12]
    assert result.best_step in (6, 12)


def test_a_start_over_is_told(one: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = RunFolder(tmp_path)
    for step in (2, 4):
        checkpoint = place.checkpoints / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "optimizer.pt").write_bytes(b"all of it")
        mark_complete(checkpoint, {})
        (checkpoint / "optimizer.pt").write_bytes(b"all")
    assert place.last_checkpoint(9) is None
    told = [record.getMessage() for record in caplog.records]
    assert "checkpoint-4" in told[0]
    assert told[0].endswith("the checkpoint before it is used")
    assert "checkpoint-2" in told[1]
    assert told[1].endswith("the run starts from the beginning")


def test_what_a_kill_cut_short_is_removed_and_the_latest_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is left of it would become a part of the checkpoint that the run writes in its place."""
    place = RunFolder(tmp_path)
    for step in (8, 10, 12):  # as words, 10 and 12 come before 8
        (place.checkpoints / f"checkpoint-{step}").mkdir(parents=True)
        mark_complete(place.checkpoints / f"checkpoint-{step}", {})
    cut_short = place.checkpoints / "checkpoint-11"
    cut_short.mkdir()
    assert place.last_checkpoint(12) == place.checkpoints / "checkpoint-10"
    assert not cut_short.exists()
    assert not caplog.records  # it is what a kill leaves, and nobody has altered anything
    assert len(list(place.checkpoints.iterdir())) == 3


def test_two_processes_do_not_make_one_run(one: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasam.lab.experiments.lock.PATIENCE", 0.1)
    said: list[str] = []

    def again(step: int, *_: Any) -> None:
        if step == 1:
            with pytest.raises(ConfigError) as error:
                run(one, tmp_path / "run")
            said.append(str(error.value))

    run(one, tmp_path / "run", watch=again)
    (text,) = said
    assert "another process is making this run" in text
    assert "--output" in text
    assert run(one, tmp_path / "run").steps == 12  # nobody holds it any more
