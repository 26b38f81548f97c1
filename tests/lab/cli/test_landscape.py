"""``deltasam analyze landscape``: measured once, stored in the run folder, shown in the report."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltasam.lab.cli import main
from deltasam.lab.cli.landscape import Landscape
from deltasam.lab.experiments import RunConfig, run
from deltasam.lab.report import html_report, read_runs
from helpers.pretrained import bert_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


def test_slices_are_stored_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["text,label", *(f"{'the cat sat' if i % 2 else 'a dog ran'} {i},{i % 2}" for i in range(16))]
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    files = dict.fromkeys(("train", "validation"), str(tmp_path / "rows.csv"))
    task = {"name": "classification", "files": files, "text": "text", "label": "label", "max_length": 24}
    plain = {"task": task, "model": str(bert_folder(tmp_path / "bert")), "method": "delta-sam", "batch": {"size": 8}}
    folder = tmp_path / "runs/one"
    run(RunConfig.from_plain({**plain, "schedule": {"steps": 2}, "checkpoint_every": "never"}), folder)

    words = ["analyze", "landscape", str(folder), "--points", "3", "--plane", "2", "--rows", "8"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "SAM's direction" in out
    assert "Euclidean distances from -0.1 to 0.1" in out  # the legend
    assert "landscape  11/11" in err  # 3 lines of 3 points, a plane of 2 rows
    kept = folder / "analysis/landscape.json"
    lines = json.loads(kept.read_text())["lines"]
    places = {name: line["x"] for name, line in lines.items()}
    assert places["a random direction"] == [-0.5, 0.0, 0.5]  # --reach
    assert places["SAM's direction"] == [-0.1, 0.0, 0.1]  # --rho
    assert places["each instance's direction"] == [0.0, 0.05, 0.1]
    os.utime(kept, (1, 1))  # long ago, whatever the resolution of the clock
    assert main(words) == 0
    assert kept.stat().st_mtime == 1
    assert main([*words[:-1], "6"]) == 0  # with other settings
    assert kept.stat().st_mtime > 1

    assert main(["analyze", "examples", str(folder), "--rows", "8", "--most", "2"]) == 0
    assert "text: " in capsys.readouterr().out
    found = json.loads((folder / "analysis/instance-weights.json").read_text())
    assert len(found["weights"]) == 8
    assert [example["rank"] for example in found["examples"]] == [1, 2, 7, 8]
    found["examples"][0]["text"] = "<script>alert(1)</script>"
    (folder / "analysis/instance-weights.json").write_text(json.dumps(found))

    page = html_report(read_runs(tmp_path / "runs"), [])
    assert '<section id="landscape">' in page
    assert "Weights g at the end" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
    for direction in ("a random direction", "SAM's direction", "each instance's direction", "two random"):
        assert f"Loss along {direction}" in html.unescape(page)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "landscape", str(tmp_path)]) == 2
    assert "run folder" in capsys.readouterr().err
    assert main(["analyze", "landscape", str(tmp_path), "--points", "2"]) == 2


def test_contrastive_objectives_have_no_direction_per_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Together:
        separable = False

        def __call__(self, model: Any, batch: Any) -> Any:
            return (model(batch) - model(batch).mean()).squeeze(-1) ** 2

    batch = torch.randn(4, 3)
    loaded = SimpleNamespace(model=torch.nn.Linear(3, 1), batches=lambda size: [batch], objective=Together())
    monkeypatch.setattr("deltasam.lab.experiments.load_run", lambda *_, **__: (None, loaded))
    found = Landscape(folders=(tmp_path,), points=3, plane=0)._measure(tmp_path)
    assert list(found["lines"]) == ["a random direction", "SAM's direction"]
