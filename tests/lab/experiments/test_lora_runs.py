"""Runs of a language model with adapters: what is trained, saved, measured, resumed, evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deltasam.lab.cli import main
from deltasam.lab.experiments import ConfigError, Lora, RunConfig, RunFolder, load_run, run
from helpers.fault_runs import Interrupted, interrupt_at
from helpers.pretrained import bert_folder, llama_folder

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(llama_folder(tmp_path_factory.mktemp("llama")))


def config(path: str, **sections: Any) -> RunConfig:
    small = {"train_rows": 16, "eval_rows": 12, "max_length": 256, "general_rows": 6, "bits": [4]}
    plain = {
        "task": {"name": "docstrings-prompt", **small},
        "model": {"path": path, "lora": {"r": 2}},
        "method": {"name": "PerInstanceSAM", "rho": 0.02, "params": "base"},
        "optimizer": {"lr": 1e-2},
        "schedule": {"epochs": 1},
        "batch": {"size": 4},
        "checkpoint_every": 2,
        "evaluate_every": "end",
    }
    return RunConfig.from_plain({**plain, **sections})


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model/adapter_model.safetensors")


def test_adapters_are_trained_saved_loaded_and_evaluated(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(config(llama), tmp_path / "run")
    assert {"accuracy", "nll", "ece", "general_nll", "general_nll_before", "forgetting", "accuracy_4bit"} <= set(
        result.metrics
    )
    assert result.origins["general text"] == "topics of Python's help()"
    assert (result.forward_passes, result.backward_passes) == (8, 8)
    saved = adapters(tmp_path / "run")
    assert all("lora_" in name for name in saved)
    assert any(weight.abs().sum() > 0 for name, weight in saved.items() if "lora_B" in name)
    assert result.parameters == sum(weight.numel() for weight in saved.values())
    _, loaded = load_run(tmp_path / "run")
    found = loaded.task.evaluate(loaded.model, loaded.tokenizer, loaded.rows)
    assert found["nll"] == pytest.approx(result.metrics["nll"], rel=1e-5)
    assert main(["evaluate", str(tmp_path / "run"), "--rows", "12", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics == pytest.approx({k: v for k, v in result.metrics.items() if k in metrics}, rel=1e-4)
    assert "forgetting" in metrics
    assert main(["evaluate", "--task", "docstrings-prompt", "--model", str(tmp_path / "run/model")]) == 2
    assert "holds adapters without their model; name the run folder" in capsys.readouterr().err


def test_an_interrupted_run_ends_like_an_undisturbed_one(llama: str, tmp_path: Path) -> None:
    whole = run(config(llama), tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(config(llama), tmp_path / "cut", watch=interrupt_at(3))
    assert RunFolder(tmp_path / "cut").last_checkpoint(99) is not None
    again = run(config(llama), tmp_path / "cut")
    one, other = adapters(tmp_path / "whole"), adapters(tmp_path / "cut")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert again.metrics == whole.metrics


def test_full_fine_tuning_measures_forgetting_against_the_first_weights(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(config(llama, model=llama, method="ERM"), tmp_path / "run")
    assert result.metrics["forgetting"] == pytest.approx(
        result.metrics["general_nll"] - result.metrics["general_nll_before"]
    )
    assert result.metrics["forgetting"] != 0
    assert main(["evaluate", str(tmp_path / "run"), "--rows", "12", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["forgetting"] == pytest.approx(result.metrics["forgetting"], abs=1e-4)


def test_own_conversations(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"role": "user", "content": "get it"}, {"role": "assistant", "content": "the file"}]
    own, text = tmp_path / "own.jsonl", tmp_path / "text.txt"
    own.write_text((json.dumps({"messages": turns}) + "\n") * 8)
    text.write_text("it is the name of the file and it is in the file")
    files = [f"task.files.{split}={own}" for split in ("train", "validation")]
    options = ["--preset", "llm/chat/per-instance", "--model", llama, "--output", str(tmp_path / "run")]
    assert main(["train", *options, *files, f"task.general={text}", "task.bits=[4]", "optimizer.lr=0.05"]) == 0
    assert "forgetting" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "run/result.json").read_text())["metrics"]
    assert {"nll", "perplexity", "token_accuracy", "forgetting", "nll_4bit"} <= set(metrics)


def test_an_encoder_trains_its_head_with_the_adapters(tmp_path: Path) -> None:
    bert = str(bert_folder(tmp_path / "bert"))
    task = {"name": "docstrings", "train_rows": 8, "eval_rows": 8, "max_length": 24}
    run(config(bert, task=task, model={"path": bert, "lora": 2}, method="SAM"), tmp_path / "run")
    assert any("classifier" in name for name in adapters(tmp_path / "run"))
    _, loaded = load_run(tmp_path / "run")
    assert any("classifier" in name and p.requires_grad for name, p in loaded.model.named_parameters())


def test_section() -> None:
    plain = {"task": "mrpc", "model": {"path": "m", "lora": True}}
    assert RunConfig.from_plain(plain).model.lora == Lora()
    for given in (8, "8", {"r": 8}, Lora(r=8)):
        assert RunConfig.from_plain({"task": "mrpc", "model": {"path": "m", "lora": given}}).model.lora == Lora(r=8)
    made = RunConfig.from_plain({"task": "mrpc", "model": {"path": "m", "lora": {"r": 4, "targets": "q_proj"}}})
    assert made == RunConfig.from_plain(made.to_plain())
    assert made.model.lora == Lora(r=4, targets=("q_proj",))
    without = RunConfig.from_plain({"task": "mrpc", "model": "m"})
    assert RunConfig.from_plain({"task": "mrpc", "model": {"path": "m", "lora": False}}) == without
    assert made.run_id != without.run_id == RunConfig.from_plain(without.to_plain()).run_id


def test_ids_of_runs_without_adapters_are_those_of_earlier_versions() -> None:
    former = {"task": "mrpc", "model": "bert-base-cased", "method": {"name": "SAM", "rho": 0.05}}
    assert RunConfig.from_plain(former).run_id == "b26cf06bb205"


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8}, r"model.lora.rank: unknown option of Lora"),
        ({"r": 0}, "model.lora: r"),
        ({"dropout": 1.5}, "dropout=1.5"),
        ([1], "model.lora"),
        ({"targets": []}, "targets"),
    ],
)
def test_wrong_options(lora: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_plain({"task": "mrpc", "model": {"path": "m", "lora": lora}})


def test_layers_that_do_not_exist(llama: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.lora.targets=\['nowhere'\]"):
        run(config(llama, model={"path": llama, "lora": {"targets": ["nowhere"]}}), tmp_path)
    with pytest.raises(ConfigError, match=r"params='base'.*no adapters"):
        run(config(llama, model=llama), tmp_path)


def test_frozen_weights_are_another_run() -> None:
    given = {"task": "mnli-prompt", "model": {"path": "smollm2-135m", "lora": True}}
    ids = [RunConfig.from_plain({**given, "method": {"name": "SAM", "params": p}}).run_id for p in ("trained", "all")]
    assert ids[0] != ids[1]
