"""Adaptive search: trials are runs, and a stopped search resumes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from deltasam.lab.cli import main
from deltasam.lab.experiments import ConfigError, DivergedError
from deltasam.lab.sweeps import read_search, run_search
from helpers.folders import classification_task
from helpers.pretrained import bert_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning", "ignore::UserWarning:optuna")


def write(folder: Path, **changes: Any) -> Path:
    common = {
        "task": classification_task(folder, rows=16),
        "model": str(folder / "bert"),
        "method": "sam",
        "batch": {"size": 8},
    }
    common |= {"batch": {"size": 8}, "schedule": {"steps": 1}, "evaluate_every": "end", "checkpoint_every": "never"}
    space = {"method.rho": {"low": 0.01, "high": 0.1, "log": True}, "optimizer.lr": [1e-4, 1e-3]}
    path = folder / "search.yaml"
    path.write_text(yaml.safe_dump({"common": common, "space": space, "trials": 2, **changes}))
    return path


def test_trials_are_runs_and_a_search_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    bert_folder(tmp_path / "bert")
    out = tmp_path / "out"
    assert main(["search", str(write(tmp_path)), "--output", str(out)]) == 0
    shown, progress = capsys.readouterr()
    assert "search  1/1" in progress
    assert "method.rho" in shown
    assert not re.search(r"\d\.\d{8}", shown)  # rounded for the screen
    made = {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")}
    assert len(made) == 2
    study = run_search(read_search(write(tmp_path, trials=3)), out)
    assert len(study.trials) == 3
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert 0.01 <= study.best_params["method.rho"] <= 0.1
    assert study.direction.name == "MAXIMIZE"
    other = read_search(write(tmp_path, space={"method.rho": [0.01, 0.2]}))
    with pytest.raises(ConfigError, match=r"study 'search' belongs to another search .*--output"):
        run_search(other, out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": {}}, "space, seeds and trials"),
        ({"space": {"method.rho": {"low": 1, "high": 0.1}}}, "low must be less than high"),
        ({"space": {"method.rho": 0.1}}, "must be a list"),
        ({"spaces": {}}, "did you mean space"),
        ({"space": {"seed": [1, 2]}}, r"space.seed has no effect"),
        ({"space": {"method.rho": {"low": "a", "high": 1}}}, r"space.method.rho=.*: low and high must be numbers"),
        ({"space": {"method.rho": {"low": 0, "high": 1, "log": True}}}, r"space.method.rho=.*: log needs low above 0"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_search(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"method.rho": [0.1, -1]}, "space.method.rho, -1: method: rho=-1.0 must be"),
        ({"optimizer.lr": {"low": 1e-3, "high": "fast"}}, "low and high must be numbers"),
        ({"batch.size": {"low": 0, "high": 8}}, "space.batch.size, 0: batch: size=0 must be"),
        (
            {"batch.size": {"low": 1.5, "high": 8}},
            "space.batch.size, 1.5: batch.size=1.5: Input should be",
        ),
    ],
)
def test_every_choice_is_checked_before_the_first_trial(
    tmp_path: Path, space: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    assert main(["search", str(write(tmp_path, space=space)), "--output", str(tmp_path / "out")]) == 2
    output = capsys.readouterr().err.strip()
    assert message in output
    assert "\n" not in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ends", [{"low": 2, "high": 9}, {"low": 2.0, "high": 9}, {"low": "2e0", "high": "9e0"}])
def test_a_range_of_integers(tmp_path: Path, ends: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends may be text: YAML reads 1e2 as text."""
    pytest.importorskip("optuna")
    tried = []

    def ran(config: Any, *_: Any, **__: Any) -> Any:
        tried.append(config)
        return SimpleNamespace(score=0.5)

    monkeypatch.setattr("deltasam.lab.sweeps._search.run", ran)
    space = {"batch.size": ends, "method.rho": {"low": 0, "high": 1}}
    run_search(read_search(write(tmp_path, space=space, trials=6)), tmp_path / "out")
    assert len({config.batch.size for config in tried}) > 1
    assert all(2 <= config.batch.size <= 9 for config in tried)
    assert any(config.method.rho % 1 for config in tried)  # a radius is not an integer, whatever its ends are


def test_a_search_without_a_space_raises(tmp_path: Path) -> None:
    file = tmp_path / "rho.yaml"
    file.write_text("common: {task: mrpc}")
    with pytest.raises(ConfigError, match=r"rho.yaml: `space` is missing"):
        read_search(file)


def test_a_storage_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    bert_folder(tmp_path / "bert")
    assert main(["search", str(write(tmp_path)), "--output", str(tmp_path / "out"), "--storage", "foo://x"]) == 2
    assert "--storage foo://x: cannot be used (Can't load plugin" in capsys.readouterr().err


def test_choices_may_be_strings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    bert_folder(tmp_path / "bert")
    file = write(tmp_path, space={"method.params": ["all", "norms"]}, trials=1)
    assert main(["search", str(file), "--output", str(tmp_path / "out")]) == 0
    assert "method.params=" in capsys.readouterr().out


def test_trials_that_diverge_are_shown_and_the_search_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    bert_folder(tmp_path / "bert")
    common = yaml.safe_load(write(tmp_path).read_text())["common"]
    common |= {"schedule": {"steps": 2, "warmup": 0}, "optimizer": {"max_grad_norm": 0}}
    file = write(tmp_path, common=common, space={"optimizer.lr": [1e30]}, trials=2)
    out = tmp_path / "out"
    assert main(["search", str(file), "--output", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("diverged  optimizer.lr=1e+30") == 2
    assert "failed" not in shown.err
    study = run_search(read_search(file), out)  # they count among the trials
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "PRUNED"]


def test_a_run_that_ends_because_it_diverges_does_not_end_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")

    def diverges(*_: Any, **__: Any) -> Any:
        raise DivergedError("the gradient was not finite in 25 updates in a row")

    monkeypatch.setattr("deltasam.lab.sweeps._search.run", diverges)
    bert_folder(tmp_path / "bert")
    study = run_search(read_search(write(tmp_path)), tmp_path / "out")
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "PRUNED"]


def test_the_value_of_a_trial_is_the_mean_over_all_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    scores = {1: 0.75, 2: 1.0, 3: -0.25}  # neither the first, the best nor the middle one is the mean
    monkeypatch.setattr(
        "deltasam.lab.sweeps._search.run", lambda config, *_, **__: SimpleNamespace(score=scores[config.seed])
    )
    study = run_search(read_search(write(tmp_path, seeds=[1, 2, 3], trials=1)), tmp_path / "out")
    assert study.best_value == 0.5


def test_a_line_that_a_kill_cut_short_costs_that_line_only(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    bert_folder(tmp_path / "bert")
    out = tmp_path / "out"
    run_search(read_search(write(tmp_path)), out)
    journal = out / "study.journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])  # the record that the second trial is complete
    study = run_search(read_search(write(tmp_path)), out)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "RUNNING", "COMPLETE"]
    assert len(run_search(read_search(write(tmp_path)), out).trials) == 3
