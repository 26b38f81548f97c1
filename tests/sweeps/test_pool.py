"""Processes that make one run after the other, as they do on GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from deltasam.experiments import ConfigError, RunConfig, run
from deltasam.experiments.sweeps import LocalPool, read_sweep, run_sweep
from helpers.pretrained import bert_folder


def sweep(folder: Path, **changes: Any) -> Any:
    rows = ["text,label", *(f"{'the cat sat' if i % 2 else 'a dog ran'} {i},{i % 2}" for i in range(24))]
    (folder / "rows.csv").write_text("\n".join(rows))
    files = dict.fromkeys(("train", "validation"), str(folder / "rows.csv"))
    task = {"name": "classification", "files": files, "text": "text", "label": "label", "max_length": 24}
    common = {"schedule": {"steps": 3}, "batch": {"size": 8}, "evaluate_every": "end", "checkpoint_every": "never"}
    model = str(bert_folder(folder / "bert"))
    plain = {"tasks": [task], "models": [model], "methods": ["sam"], "common": common, "seeds": [1, 2]}
    (folder / "s.yaml").write_text(yaml.safe_dump({**plain, "keep": "results", **changes}))
    return read_sweep(folder / "s.yaml")


def losses(folder: Path) -> dict[str, float]:
    found = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/result.json")}
    return {name: result["metrics"]["loss"] for name, result in found.items()}


def test_a_process_makes_all_runs_and_the_second_is_that_of_a_fresh_process(tmp_path: Path) -> None:
    # An empty name of a GPU hides them all: what is tested is the way runs are handed on.
    pool = LocalPool(workers=1, gpus=("",))
    assert not run_sweep(sweep(tmp_path), tmp_path / "both", pool).failed
    assert not run_sweep(sweep(tmp_path, seeds=[2]), tmp_path / "second", pool).failed
    both, second = losses(tmp_path / "both"), losses(tmp_path / "second")
    assert len(set(both.values())) == 2
    assert len(second) == 1
    assert second.items() <= both.items()
    assert not list((tmp_path / "both").glob("*/model"))  # keep: results


@pytest.mark.slow
def test_after_a_failure_another_process_goes_on(tmp_path: Path) -> None:
    methods = {"broken": {"method": "sam", "batch": {"size": 25, "drop_last": True}}, "erm": "erm"}
    outcome = run_sweep(sweep(tmp_path, methods=methods), tmp_path / "out", LocalPool(workers=1, gpus=("",)))
    assert len(outcome.failed) == 2
    assert len(losses(tmp_path / "out")) == 2


def test_tf32_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    config = RunConfig.from_plain({"task": "cola", "model": str(bert_folder(tmp_path / "b")), "precision": "tf32"})
    with pytest.raises(ConfigError, match="precision=tf32: needs a CUDA device; use fp32"):
        run(config, tmp_path / "run")
