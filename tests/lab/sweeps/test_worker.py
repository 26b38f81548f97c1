"""One run of a sweep: its adversarial risk, and what is kept of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltasam.lab.plugins import VARIABLE
from deltasam.lab.sweeps import Job
from deltasam.lab.sweeps._measure import RISK, is_measured, record_risk
from deltasam.lab.sweeps._sweep import _is_missing
from deltasam.lab.sweeps._worker import _clean_up, _note, make

OTHER = {"rho": 0.1, "rows": 8, "steps": 3, "split": "test"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records the calls of the loader and of the measurement, which are replaced."""
    found: list[dict[str, Any]] = []

    def load_run(folder: Path, **options: Any) -> tuple[None, Any]:
        found.append(options)
        return None, SimpleNamespace(model=None, objective=None, batches=lambda size: size)

    def adversarial_risk(model: Any, batches: int, objective: Any, **options: Any) -> Any:
        found[-1] |= {**options, "batch_size": batches}
        return SimpleNamespace(value=2.0, clean=1.0, losses=[1.0])

    monkeypatch.setattr("deltasam.lab.sweeps._measure.load_run", load_run)
    monkeypatch.setattr("deltasam.analysis.adversarial_risk", adversarial_risk)
    return found


def test_every_option_reaches_the_measurement(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    record_risk(tmp_path, **OTHER, batch_size=4, data="there")
    assert asked == [{**OTHER, "batch_size": 4, "data": "there"}]
    assert json.loads((tmp_path / "analysis" / RISK).read_text())["settings"] == OTHER


@pytest.mark.parametrize("option", OTHER)
def test_a_risk_with_other_options_is_measured_again(option: str, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    record_risk(tmp_path)
    assert is_measured(tmp_path, batch_size=4)  # affects time and memory only
    record_risk(tmp_path, batch_size=4)
    assert len(asked) == 1
    changed = {option: OTHER[option]}
    assert not is_measured(tmp_path, **changed)
    record_risk(tmp_path, **changed)
    assert len(asked) == 2
    assert is_measured(tmp_path, **changed)


@pytest.mark.parametrize(
    ("keep", "stays"), [("checkpoints", {"checkpoints", "model"}), ("weights", {"model"}), ("results", set())]
)
def test_what_is_kept_of_a_run(keep: str, stays: set[str], tmp_path: Path) -> None:
    job = Job(name="run", config={}, folder=tmp_path, keep=keep)
    for name in ("checkpoints", "model"):
        (job.run_folder / name).mkdir(parents=True)
    (job.run_folder / "result.json").write_text("{}")
    _clean_up(job)
    assert {path.name for path in job.run_folder.iterdir()} == {"result.json", *stays}


def finished(**changes: Any) -> Any:
    made = {"config": {"capture": True}, "device": "a GPU", "captured_steps": 7}
    return SimpleNamespace(primary_metric="accuracy", primary_value=0.5, **{**made, **changes})


@pytest.mark.parametrize(
    ("changes", "is_said"),
    [({}, False), ({"captured_steps": 0}, True), ({"captured_steps": 0, "device": "cpu, 2 threads"}, False),
     ({"captured_steps": 0, "config": {"capture": False}}, False)],
    ids=["captured", "not captured", "on a CPU", "not wanted"],
)  # fmt: skip
def test_a_run_that_could_not_be_captured_says_so(changes: dict[str, Any], is_said: bool) -> None:
    assert bool(_note(finished(**changes))) == is_said


@pytest.mark.parametrize("keep", ["results", "weights"])
def test_the_risk_is_measured_before_the_weights_are_removed(
    keep: str,
    asked: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    libraries_speak_again: None,
) -> None:
    def run(config: Any, folder: Path, *, watch: Any, keep_weights: bool) -> Any:
        (folder / "model").mkdir(parents=True) if keep_weights else folder.mkdir()
        return finished()

    monkeypatch.setattr("deltasam.lab.sweeps._worker.run", run)
    monkeypatch.setenv(VARIABLE, "")
    config = {"task": "mrpc", "model": "bert-base-cased", "data": "there"}
    job = Job(name="run", config=config, folder=tmp_path, keep=keep, risk={"rho": 0.1})
    assert make(job, torch.get_num_threads(), lambda message: None) == (True, "accuracy", 0.5, "")
    assert [(one["rho"], one["data"]) for one in asked] == [(0.1, "there")]
    assert (job.run_folder / "analysis" / RISK).is_file()
    assert (job.run_folder / "model").is_dir() == (keep == "weights")


def test_a_finished_run_without_its_risk_is_missing(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    def missing(risk: dict[str, Any] | None) -> bool:
        return _is_missing(tmp_path, risk)

    assert missing(None)
    (tmp_path / "result.json").write_text("{}")
    assert not missing(None)
    assert not missing({"rho": 0.1})  # without weights there is nothing to measure
    (tmp_path / "model").mkdir()
    assert missing({"rho": 0.1})
    record_risk(tmp_path, rho=0.1)
    assert not missing({"rho": 0.1})
    assert missing({"rho": 0.1, "steps": 2})
