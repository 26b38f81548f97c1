"""A run stopped by a signal: after the update, with one checkpoint and no additional evaluation."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltasam.integrations.storage import seal
from deltasam.lab.experiments import ConfigError, RunConfig, RunFolder, RunStoppedError, run
from deltasam.lab.experiments._folder import COMPLETE
from deltasam.lab.experiments._trainer import RunTrainer
from helpers.fault_runs import Interrupted, interrupt_at
from helpers.pretrained import bert_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Two epochs of six updates, evaluated and saved after each."""
    task = {"name": "docstrings", "train_rows": 48, "eval_rows": 30, "max_length": 24}
    sections = {"optimizer": {"lr": 1e-3}, "schedule": {"epochs": 2}, "batch": {"size": 8}}
    return RunConfig.from_plain({"task": task, "model": str(bert_folder(tmp_path_factory.mktemp("m"))), **sections})


def signal_at(at: int) -> Callable[[int, int, dict[str, float]], None]:
    def watch(step: int, total: int, latest: dict[str, float]) -> None:
        if step == at - 1:  # the signal is seen at the end of the next update
            os.kill(os.getpid(), signal.SIGTERM)

    return watch


def evaluations(folder: Path) -> list[int]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry["step"] for entry in entries if "eval_accuracy" in entry]


@pytest.mark.parametrize(("at", "evaluated"), [(3, []), (6, [6]), (8, [6])])
def test_a_stop_makes_no_evaluation_that_is_not_due(
    at: int, evaluated: list[int], one: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    save = RunTrainer._save_checkpoint
    monkeypatch.setattr(
        RunTrainer, "_save_checkpoint", lambda self, *args: (saved.append(self.state.global_step), save(self, *args))
    )
    with pytest.raises(RunStoppedError, match=f"after update {at} of 12"):
        run(one, tmp_path / "run", watch=signal_at(at))
    assert evaluations(tmp_path / "run") == evaluated
    assert saved == sorted({*evaluated, at}), "no checkpoint is written twice"
    assert (tmp_path / f"run/checkpoints/checkpoint-{at}/complete.json").is_file()
    result = run(one, tmp_path / "run")
    assert evaluations(tmp_path / "run") == [6, 12]
    assert result.best_step in (6, 12)


@pytest.mark.parametrize("stop", [interrupt_at, signal_at])
@pytest.mark.parametrize("at", [6, 7])
def test_a_checkpoint_at_the_end_of_an_epoch_has_its_evaluation(
    stop: Callable[[int], Any], at: int, one: RunConfig, tmp_path: Path
) -> None:
    every = dataclasses.replace(one, checkpoint_every=3)  # updates; an epoch has six
    whole = run(every, tmp_path / "whole")
    with pytest.raises((Interrupted, RunStoppedError)):
        run(every, tmp_path / "run", watch=stop(at))
    result = run(every, tmp_path / "run")
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole") == [6, 12]
    assert (result.best_value, result.best_step) == (whole.best_value, whole.best_step)


def test_a_restart_from_the_beginning_is_logged(
    one: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = RunFolder(tmp_path)
    for step in (2, 4):
        checkpoint = place.checkpoints / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "optimizer.pt").write_bytes(b"all of it")
        seal(checkpoint, COMPLETE, {})
        (checkpoint / "optimizer.pt").write_bytes(b"all")
    assert place.last_checkpoint(9) is None
    messages = [record.getMessage() for record in caplog.records]
    assert "checkpoint-4" in messages[0]
    assert messages[0].endswith("the checkpoint before it is used")
    assert "checkpoint-2" in messages[1]
    assert messages[1].endswith("the run starts from the beginning")


def test_incomplete_checkpoints_are_removed_and_the_latest_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files would become a part of the checkpoint that the run writes in its place."""
    place = RunFolder(tmp_path)
    for step in (8, 10, 12):  # as strings, 10 and 12 sort before 8
        (place.checkpoints / f"checkpoint-{step}").mkdir(parents=True)
        seal(place.checkpoints / f"checkpoint-{step}", COMPLETE, {})
    cut_short = place.checkpoints / "checkpoint-11"
    cut_short.mkdir()
    assert place.last_checkpoint(12) == place.checkpoints / "checkpoint-10"
    assert not cut_short.exists()
    assert not caplog.records  # a kill leaves this; nothing was altered
    assert len(list(place.checkpoints.iterdir())) == 3


def test_two_processes_do_not_make_one_run(one: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasam.lab.experiments.lock.PATIENCE", 0.1)
    errors: list[str] = []

    def again(step: int, *_: Any) -> None:
        if step == 1:
            with pytest.raises(ConfigError) as error:
                run(one, tmp_path / "run")
            errors.append(str(error.value))

    run(one, tmp_path / "run", watch=again)
    (text,) = errors
    assert "another process is making this run" in text
    assert "--output" in text
    assert run(one, tmp_path / "run").steps == 12  # the lock is released
