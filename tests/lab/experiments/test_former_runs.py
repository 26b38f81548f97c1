"""Runs of the version before: their ids stay the same, unfinished ones resume, finished ones load."""

from __future__ import annotations

import json
import logging
import tarfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from deltasam.lab.cli import main
from deltasam.lab.experiments import RunConfig, load_run, run
from helpers.data import REPOSITORY

# Made by the version whose methods had `sharpness=` instead of `scope=`: six updates of LookSAM with a tiny BERT, in
# `stopped/` interrupted by SIGTERM after the fourth. Machine-specific entries were removed from the JSON files.
ARCHIVE = Path(__file__).parent / "data" / "former_runs.tar.xz"


@pytest.fixture
def former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(transformers.__version__ < "5", reason="the Trainer's own files were written by transformers 5")
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_an_interrupted_run_resumes_and_ends_as_the_former_version_would(former: Path) -> None:
    config = RunConfig.read(former / "stopped" / "config.yaml")
    assert config.run_id == "3922d492084b"
    assert config.method.scope == "local"
    steps: list[int] = []
    run(config, former / "stopped", watch=lambda step, *_: steps.append(step))
    assert steps == [5, 6]
    found, wanted = (load_file(former / name / "model/model.safetensors") for name in ("stopped", "finished"))
    for name, weights in wanted.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-4, atol=1e-6)


def test_a_finished_run_is_found_loaded_and_evaluated(former: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", "5.0")  # wrote its tokenizer, which earlier versions cannot load
    folder = former / "finished"
    config, loaded = load_run(folder)
    assert run(config, folder).primary_value == 0.625
    assert len(loaded.rows) == 16
    assert main(["evaluate", str(folder), "--rows", "16"]) == 0
    assert "0.6250" in capsys.readouterr().out


def test_a_former_name_is_read_with_a_note_and_the_present_one_wins(caplog: pytest.LogCaptureFixture) -> None:
    from deltasam.lab.experiments import _parts

    _parts._note_former_name.cache_clear()
    plain = {"task": "mrpc", "model": "bert-base-cased", "method": {"name": "SAM", "sharpness": "global"}}
    with caplog.at_level(logging.WARNING):
        former, again = RunConfig.from_plain(plain), RunConfig.from_plain(plain)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "method.sharpness is now called method.scope"
    ]
    assert former == again
    assert former.method.scope == "global"
    assert former.run_id == RunConfig.from_plain(plain | {"method": {"name": "SAM", "scope": "global"}}).run_id
    both = RunConfig.from_plain(plain | {"method": {"name": "SAM", "sharpness": "global", "scope": "local"}})
    assert both.method.scope == "local"


def check_ids(paths: list[Path]) -> None:
    for path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        assert RunConfig.from_plain(result["config"]).run_id == result["run_id"], path


def committed() -> list[Path]:
    return sorted((REPOSITORY / "results").glob("**/result.json"))


def test_ids_of_the_committed_runs_are_stable() -> None:
    """One run of every folder, task and method; a changed id would make sweeps repeat runs that exist."""
    kinds = {(path.parents[1], path.parent.name.rsplit("-", 2)[0]): path for path in committed()}  # -s<seed>-<id>
    assert len(kinds) > 100
    check_ids(list(kinds.values()))


@pytest.mark.slow
def test_ids_of_all_committed_runs_are_stable() -> None:
    check_ids(committed())
