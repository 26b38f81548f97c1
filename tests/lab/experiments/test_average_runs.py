"""Runs with an average of the weights: what is evaluated, saved, resumed, named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deltasam.lab.experiments import Average, ConfigError, RunConfig, load_run, run
from deltasam.lab.report import method_name, read_runs
from helpers.fault_runs import Interrupted, interrupt_at
from helpers.pretrained import bert_folder, llama_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(bert_folder(tmp_path_factory.mktemp("bert")))


def config(bert: str, **sections: Any) -> RunConfig:
    task = {"name": "docstrings", "train_rows": 32, "eval_rows": 16, "max_length": 24}
    plain = {
        "task": task, "model": bert, "optimizer": {"lr": 1e-2}, "schedule": {"epochs": 2}, "batch": {"size": 8},
        "checkpoint_every": 3, "average": {"kind": "swa", "start": 0.25},
    }  # fmt: skip
    return RunConfig.from_plain({**plain, **sections})


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model/model.safetensors")


def test_the_average_is_evaluated_and_saved_and_an_interrupted_run_ends_with_it(bert: str, tmp_path: Path) -> None:
    one = config(bert)
    result = run(one, tmp_path / "whole")
    assert result.method == "ERM+SWA"
    assert "-ERM-SWA-s42-" in one.run_name
    with pytest.raises(Interrupted):
        run(one, tmp_path / "parts", watch=interrupt_at(5))  # after the checkpoint at 3
    run(one, tmp_path / "parts")
    first, second = saved(tmp_path / "whole"), saved(tmp_path / "parts")
    assert all(torch.equal(first[name], second[name]) for name in first)
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "parts")]
    assert logs[0] == logs[1]

    run(config(bert, average=None), tmp_path / "plain")
    plain = saved(tmp_path / "plain")
    assert any(not torch.allclose(first[name], plain[name], atol=1e-4) for name in first)
    losses = [
        [json.loads(line).get("loss") for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "plain")
    ]
    assert losses[0] == losses[1]  # the trained weights are the same
    _, loaded = load_run(tmp_path / "whole")
    found = loaded.task.evaluate(loaded.model, loaded.tokenizer, loaded.rows)
    assert found["loss"] == pytest.approx(result.metrics["loss"], rel=1e-5)

    runs = {each.path.name: each for each in read_runs(tmp_path).finished}
    assert set(runs) == {"parts", "plain"}  # the whole one is the same run
    assert runs["parts"].variant != runs["plain"].variant
    assert method_name(runs["parts"].method) == "SWA of the weights"
    assert dict(runs["parts"].settings)["start"] == 0.25
    assert "decay" not in dict(runs["parts"].settings)


def test_section() -> None:
    base = {"task": "mrpc", "model": "m"}
    assert RunConfig.from_plain({**base, "average": "swa"}).average == Average(kind="swa")
    made = RunConfig.from_plain({**base, "average": {"kind": "ema", "decay": "0.99"}})
    assert made.average == Average(kind="ema", decay=0.99)
    assert made == RunConfig.from_plain(made.to_plain())
    without = RunConfig.from_plain(base)
    assert made.run_id != without.run_id == RunConfig.from_plain({**base, "average": None}).run_id


@pytest.mark.parametrize(
    ("average", "message"),
    [
        ("mean", r"average.kind='mean'"),
        ({"kind": "ema", "decay": 1.5}, r"average: decay=1.5 must be in"),
        ({"decay": 0.9}, r"average: `kind` is missing"),
        ({"kind": "ema", "rate": 0.9}, r"average.rate: unknown option of Average"),
        (["ema"], r"average=\['ema'\]: must be a mapping"),
    ],
)
def test_wrong_options(average: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_plain({"task": "mrpc", "model": "m", "average": average})


def test_label_smoothing_and_noise_in_runs(bert: str, tmp_path: Path) -> None:
    arms = [{"name": "LabelSmoothing", "smoothing": 0.2}, {"name": "NEFTune", "alpha": 5.0}]
    method = {"name": "PerInstanceSAM", "rho": 0.01}
    result = run(config(bert, average=None, regularisers=arms, method=method), tmp_path / "run")
    assert result.method == "PerInstanceSAM+LabelSmoothing+NEFTune"
    assert result.forward_passes == result.backward_passes == 2 * result.steps
    scores = {"name": "stsb", "train_rows": 8}
    with pytest.raises(ConfigError, match=r"regularisers: LabelSmoothing\(objective=Regression\): has no classes"):
        run(config(bert, task=scores, regularisers=arms[:1]), tmp_path / "other")


def test_only_the_adapters_are_averaged(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    llama = str(llama_folder(tmp_path / "llama"))
    task = {"name": "docstrings-prompt", "train_rows": 8, "eval_rows": 4, "general_rows": 0, "bits": []}
    sections = {"task": task, "model": {"path": llama, "lora": 2}, "batch": {"size": 4}, "checkpoint_every": 2}
    arms = [{"name": "NEFTune", "alpha": 5.0}, {"name": "LabelSmoothing", "smoothing": 0.1}]
    one = config(llama, **sections, regularisers=arms, average={"kind": "ema", "decay": 0.5})
    run(one, tmp_path / "run")
    kept = load_file(tmp_path / "run/checkpoints/checkpoint-2/weight_average.safetensors")
    assert kept
    assert all("lora_" in name for name in kept)
    adapters = load_file(tmp_path / "run/model/adapter_model.safetensors")
    assert sum(each.numel() for each in kept.values()) == 2 * sum(each.numel() for each in adapters.values())
