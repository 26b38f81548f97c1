"""Runs: their folders and results; an interrupted run ends like an undisturbed one."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deltasam.lab.experiments import ConfigError, Result, RunConfig, RunFolder, load_run, prepare, run
from deltasam.lab.tasks import DataError
from helpers.fault_runs import Interrupted, interrupt_at
from helpers.pretrained import bert_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(bert_folder(tmp_path_factory.mktemp("bert")))


def config(bert: str, **sections: Any) -> RunConfig:
    task = {"name": "docstrings", "train_rows": 48, "eval_rows": 30, "max_length": 24}
    return RunConfig.from_plain(
        {
            "task": task,
            "model": bert,
            "optimizer": {"lr": 1e-3},
            "schedule": {"epochs": 2},
            "batch": {"size": 8},
            "checkpoint_every": 3,
            **sections,
        }
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model/model.safetensors")


def same_run(first: Path, second: Path) -> None:
    """Asserts equal weights bit for bit, equal logs, and equal results except for the times."""
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (first / "metrics.jsonl").read_text() == (second / "metrics.jsonl").read_text()
    a, b = (json.loads((folder / "result.json").read_text()) for folder in (first, second))
    for timed in ("train_seconds", "eval_seconds", "peak_memory_bytes", "environment"):
        a.pop(timed), b.pop(timed)
    assert a == b


CASES = {
    "DeltaSAM": {"method": {"name": "DeltaSAM", "rho": 0.05}},
    "LookSAM": {"method": {"name": "LookSAM", "k": 4}},
    "SMART": {"method": "ERM", "regularisers": ["SMART"]},
}


@pytest.mark.parametrize("case", CASES)
def test_interrupted_run_ends_like_an_undisturbed_one(bert: str, tmp_path: Path, case: str) -> None:
    one = config(bert, **CASES[case])
    run(one, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(one, tmp_path / "parts", watch=interrupt_at(5))  # after the checkpoint at 3
    assert not (tmp_path / "parts/result.json").exists()
    seen: list[int] = []
    run(one, tmp_path / "parts", watch=lambda step, total, latest: seen.append(step))
    assert seen == list(range(4, 13))  # resumed, not started over
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_interrupted_mid_checkpoint_and_before_the_first(bert: str, tmp_path: Path) -> None:
    one = config(bert, method="sam")
    run(one, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(one, tmp_path / "parts", watch=interrupt_at(2))  # before the first checkpoint
    with pytest.raises(Interrupted):
        run(one, tmp_path / "parts", watch=interrupt_at(8))
    (tmp_path / "parts/checkpoints/checkpoint-6/complete.json").unlink()  # as if killed while writing it
    seen: list[int] = []
    run(one, tmp_path / "parts", watch=lambda step, total, latest: seen.append(step))
    assert seen[0] == 4
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_killed_after_the_last_update(bert: str, tmp_path: Path) -> None:
    one = config(bert)
    run(one, tmp_path / "whole")
    run(one, tmp_path / "parts")
    (tmp_path / "parts/result.json").unlink()
    run(one, tmp_path / "parts")
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_finished_run_is_not_repeated(bert: str, tmp_path: Path) -> None:
    one = config(bert, schedule={"steps": 2})
    first = run(one, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    again = run(one, tmp_path / "run", watch=interrupt_at(1))
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_folder_of_another_run_is_refused(bert: str, tmp_path: Path) -> None:
    run(config(bert, schedule={"steps": 1}), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"holds another run \(docstrings-.*stays as it is"):
        run(config(bert, schedule={"steps": 1}, seed=1), tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        run(config(bert), tmp_path / "mine")
    with pytest.raises(ConfigError, match="is a file"):
        run(config(bert), tmp_path / "mine/thesis.tex")


def test_a_folder_of_runs_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a run folder .*`deltasam train` creates one"):
        load_run(tmp_path)
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"not a run folder .*such as .*a$"):
        load_run(tmp_path)


def test_nothing_is_written_for_bad_input(bert: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        run(config(bert, task="classification"), tmp_path / "run")
    with pytest.raises(DataError, match="no such folder"):
        run(config(str(tmp_path / "nowhere")), tmp_path / "run")
    with pytest.raises(ConfigError, match="leaves no batch"):
        run(config(bert, batch={"size": 100, "drop_last": True}), tmp_path / "run")
    with pytest.raises(ConfigError, match="warmup_steps=12 must be less than the 12 updates"):
        run(config(bert, schedule={"epochs": 2, "warmup_steps": 12}), tmp_path / "run")
    with pytest.raises(ConfigError, match="method=PerInstanceSAM"):
        run(config(bert, task="mirror", method="per-instance-sam"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_folder_and_result(bert: str, tmp_path: Path) -> None:
    one = config(bert, method="delta-sam", evaluate_every=3, checkpoint_every="epoch")
    result = run(one, tmp_path / "run", tensorboard=True)
    place = RunFolder(tmp_path / "run")
    assert RunConfig.read(place.config) == one
    noted = json.loads((place.path / "environment.json").read_text())["torch"]
    assert noted in (torch.__version__, torch.__version__.partition("+")[0])  # the package may omit the build
    assert list((place.path / "tensorboard").iterdir())
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ, "the variable is restored"
    saved = json.loads(place.result.read_text())
    assert set(saved) == {field.name for field in fields(Result)}
    assert Result.read(place.result) == result
    assert (result.steps, result.forward_passes, result.backward_passes) == (12, 48, 24)
    assert (result.primary_metric, result.higher_is_better, result.method) == ("accuracy", True, "DeltaSAM")
    assert (result.train_rows, result.eval_rows, result.run_id) == (48, 30, one.run_id)
    assert result.train_seconds > 0
    assert result.peak_memory_bytes > 1e7
    lines = [json.loads(line) for line in place.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_accuracy" in line] == [3, 6, 9, 12]
    assert {"loss", "learning_rate", "sharpness", "weights_mean", "grad_norm"} <= set(lines[0])
    best = max(line["eval_accuracy"] for line in lines if "eval_accuracy" in line)
    assert result.best_value == best
    assert result.primary_value == lines[-1]["eval_accuracy"] == result.metrics["accuracy"]


def test_saved_model_gives_the_reported_metrics(bert: str, tmp_path: Path) -> None:
    for pairing in ("joint", "siamese"):
        task = {"name": "docstrings", "train_rows": 16, "eval_rows": 30, "max_length": 24, "pairing": pairing}
        result = run(config(bert, task=task, schedule={"steps": 2}), tmp_path / pairing)
        _, loaded = load_run(tmp_path / pairing)
        found = loaded.task.evaluate(loaded.model, loaded.tokenizer, loaded.rows)
        final = loaded.task.final(loaded.model, loaded.tokenizer, loaded.data, loaded.rows, before={})
        assert found | final.metrics == pytest.approx(result.metrics, rel=1e-4, abs=1e-6)
        assert final.reliability["evaluation"] == [pytest.approx(one) for one in result.reliability["evaluation"]]


def test_same_seed_same_run_other_seed_other_run(bert: str, tmp_path: Path) -> None:
    short = {"steps": 3}
    run(config(bert, method="delta-sam", schedule=short), tmp_path / "a")
    run(config(bert, method="delta-sam", schedule=short), tmp_path / "b")
    run(config(bert, method="delta-sam", schedule=short, seed=1), tmp_path / "c")
    same_run(tmp_path / "a", tmp_path / "b")
    assert any(not torch.equal(one, weights(tmp_path / "c")[name]) for name, one in weights(tmp_path / "a").items())


def test_zero_radius_is_plain_training(bert: str, tmp_path: Path) -> None:
    run(config(bert, method="ERM", schedule={"steps": 4}), tmp_path / "erm")
    run(config(bert, method={"name": "SAM", "rho": 0.0}, schedule={"steps": 4}), tmp_path / "sam")
    one, other = weights(tmp_path / "erm"), weights(tmp_path / "sam")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_learning_rate_of_every_update(bert: str, tmp_path: Path) -> None:
    run(config(bert, optimizer={"lr": 1e-3}, schedule={"steps": 5, "warmup_steps": 2}), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    decay = [1e-7 + (1e-3 - 1e-7) * left for left in (1, 2 / 3, 1 / 3)]
    before, after = [0.0, 5e-4, *decay], [5e-4, *decay, 1e-7]  # the update; older Trainers log the rate of the next
    assert rates in (pytest.approx(before, rel=1e-6), pytest.approx(after, rel=1e-6))


def test_bf16_and_dropout(bert: str, tmp_path: Path) -> None:
    import transformers

    if not torch.cuda.is_available():
        for precision in ("bf16", "fp16", "tf32"):
            made = config(bert, precision=precision, schedule={"steps": 1})
            with pytest.raises(ConfigError, match=f"precision={precision}: needs .* use fp32"):
                run(made, tmp_path / precision)
            assert not (tmp_path / precision).exists()
    run(config(bert, model={"path": bert, "dropout": 0.3}, schedule={"steps": 1}), tmp_path / "dropout")
    saved = transformers.AutoConfig.from_pretrained(tmp_path / "dropout/model")
    assert (saved.hidden_dropout_prob, saved.attention_probs_dropout_prob) == (0.3, 0.3)


def test_the_run_decides_its_precision_not_the_process(
    bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``accelerate launch --mixed_precision`` and an earlier run in bfloat16 leave a variable behind."""
    made = config(bert, schedule={"steps": 2})
    run(made, tmp_path / "plain")
    assert "is ignored" not in caplog.text
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    run(made, tmp_path / "after-bf16")
    assert "ACCELERATE_MIXED_PRECISION=bf16 is ignored: the run has precision=fp32" in caplog.text
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    same_run(tmp_path / "plain", tmp_path / "after-bf16")


def test_captured_steps_see_few_shapes_and_are_the_same_run(bert: str, tmp_path: Path) -> None:
    """On the CPU nothing is captured, but texts are padded, which the attention mask covers."""
    plain = {"model": {"path": bert, "dropout": 0.0}, "schedule": {"steps": 3}, "method": "SAM"}
    made = config(bert, capture=True, **plain)
    assert made.run_id == config(bert, **plain).run_id
    prepared = prepare(made)
    rows = made.task.encode(prepared.train_rows, prepared.tokenizer, seed=made.seed)
    collate = prepared.collator()
    assert {collate([rows[i] for i in range(k, k + 8)])["input_ids"].shape for k in (0, 8, 16)} == {(8, 32)}
    assert run(made, tmp_path / "captured").captured_steps == 0
    run(config(bert, **plain), tmp_path / "ordinary")
    one, other = weights(tmp_path / "captured"), weights(tmp_path / "ordinary")
    assert all(torch.allclose(one[name], other[name], atol=2e-3) for name in one)
