"""Processes that make one run after the other, as they do on GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from deltasam.experiments import ConfigError, RunConfig, run
from deltasam.experiments.sweeps import LocalPool, final_runs, read_sweep, run_sweep
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


def test_a_process_makes_all_runs_and_they_are_those_made_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # the sums of a run depend on it
    # An empty name of a GPU hides them all: what is tested is the way runs are handed on.
    plan = sweep(tmp_path)
    outcome = run_sweep(plan, tmp_path / "out", LocalPool(workers=1, gpus=("",)))
    assert not outcome.failed
    found = losses(tmp_path / "out")
    alone = [run(planned.config, tmp_path / "alone" / str(k)) for k, planned in enumerate(final_runs(plan, {}))]
    assert sorted(found.values()) == sorted(result.metrics["loss"] for result in alone)
    assert len(set(found.values())) == 2
    assert not list((tmp_path / "out").glob("*/model"))  # keep: results


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
