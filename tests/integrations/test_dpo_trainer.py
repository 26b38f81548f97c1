"""TRL's DPOTrainer with a method."""

from __future__ import annotations

import runpy
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("trl", reason="needs a newer transformers than the oldest one")
pytest.importorskip("peft")

from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

from deltasam import DPO, ERM, SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.integrations import DPOMethodTrainer, MethodMixin
from helpers.data import REPOSITORY
from helpers.preferences import llama, lora, preferences, tokenizer
from helpers.trainers import arguments, assert_same_bits, largest_difference, weights

METRICS = (
    "loss", "entropy", "num_tokens", "logits/chosen", "logits/rejected", "mean_token_accuracy", "rewards/chosen",
    "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
)  # fmt: skip
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def dpo(folder: Path, method: Method | None, *, model: Any = None, trainer: Any = None, **options: Any) -> Any:
    """A trainer in float32 with SGD, whose weights show the gradients."""
    defaults = {
        "kind": DPOConfig, "bf16": False, "gradient_checkpointing": False, "optim": "sgd", "beta": 0.5,
        "max_grad_norm": 0.0, "logging_strategy": "steps", "logging_steps": 2, "learning_rate": 0.5,
    }  # fmt: skip
    names = ("objective", "capture", "peft_config", "ref_model")
    more = {name: options.pop(name) for name in names if name in options}
    given = {
        "model": model or llama(), "args": arguments(folder, **(defaults | options)),
        "train_dataset": preferences(), "eval_dataset": preferences(6), "processing_class": tokenizer(),
    }  # fmt: skip
    if method is None:
        return DPOTrainer(**given, **more)
    return (trainer or DPOMethodTrainer)(**given, **more, method=method)


def setting(kind: str) -> dict[str, Any]:
    """Where the reference comes from."""
    if kind == "a model":
        reference = llama()
        nn.init.normal_(reference.lm_head.weight, std=0.1)
        return {"model": llama(), "ref_model": reference}
    if kind == "a copy of the adapter":
        return {"model": lora()}
    return {"peft_config": replace(LORA, init_lora_weights=False), "precompute_ref_log_probs": kind == "columns"}


@pytest.mark.parametrize("kind", ["the base", "a model", "a copy of the adapter", "columns"])
def test_without_a_perturbation_it_is_the_plain_trainer(kind: str, tmp_path: Path) -> None:
    """The weights, and everything that TRL logs."""
    plain = dpo(tmp_path, None, **setting(kind))
    plain.train()
    expected = [entry for entry in plain.state.log_history if "loss" in entry]
    assert expected[-1]["rewards/margins"] != 0
    for method in (ERM(), SAM(rho=0.0)):
        ours = dpo(tmp_path, method, **setting(kind))
        ours.train()
        assert largest_difference(weights(plain.model), weights(ours.model)) < 1e-5
        found = [entry for entry in ours.state.log_history if "loss" in entry]
        for theirs, own in zip(expected, found, strict=True):
            want = {name: theirs[name] for name in METRICS}
            if kind == "a copy of the adapter":  # at the first step all rewards are 0 up to rounding
                own["rewards/accuracies"] = want["rewards/accuracies"]
            assert {name: own[name] for name in METRICS} == pytest.approx(want, rel=1e-3, abs=1e-5)
    moved = dpo(tmp_path, SAM(rho=0.5), **setting(kind))
    moved.train()
    assert largest_difference(weights(plain.model), weights(moved.model)) > 1e-5


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"loss_type": ["ipo"]},
                                     {"loss_type": ["robust"], "label_smoothing": 0.1},
                                     {"label_smoothing": 0.1}], ids=str)  # fmt: skip
def test_other_settings_are_trls(options: dict[str, Any], tmp_path: Path) -> None:
    plain, ours = (dpo(tmp_path, method, model=lora(), max_steps=3, **options) for method in (None, ERM()))
    plain.train()
    ours.train()
    assert largest_difference(weights(plain.model), weights(ours.model)) < 1e-5


def test_no_forward_is_added_for_the_metrics(tmp_path: Path) -> None:
    trainer, calls = dpo(tmp_path, SAM(rho=0.1), model=lora(), max_steps=2), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    trainer.model.base_model.model.model.register_forward_pre_hook(count)
    trainer.train()
    assert calls == 2 * (1 + 2), "the reference, and the two passes of SAM"


def test_per_instance_in_low_rank_equals_the_loop(tmp_path: Path) -> None:
    """Over the base, which LoRA keeps frozen: the reference stays where it is."""
    results = []
    for engine in ("low-rank", "loop"):
        method = PerInstanceSAM(rho=0.2, engine=engine, params="base")
        trainer = dpo(tmp_path, method, model=lora().double(), max_steps=2)
        trainer.train()
        results.append({name: p for name, p in weights(trainer.model).items() if "lora" in name})
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", [DeltaSAM(rho=0.05), PerInstanceSAM(rho=0.05)], ids=lambda m: type(m).__name__)
def test_common_settings(method: Method, tmp_path: Path) -> None:
    """bfloat16, checkpointing and LoRA; evaluation and resume."""
    options: dict[str, Any] = {
        "bf16": True, "gradient_checkpointing": True, "optim": "adamw_torch", "max_grad_norm": 1.0,
        "peft_config": LORA, "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3,
        "logging_steps": 1,
    }  # fmt: skip
    trainer = dpo(tmp_path / "whole", method, **options)
    trainer.train()
    logged = trainer.state.log_history
    assert "sharpness" in logged[0]
    (first, _) = [entry for entry in logged if "eval_loss" in entry]
    assert first["eval_num_tokens"] == logged[2]["num_tokens"]
    assert "eval_rewards/margins" in first
    again = dpo(tmp_path / "whole", method, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same_bits(weights(trainer.model), weights(again.model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": ["aot"]}, r"loss_type=\['aot'\] is not supported.*'sigmoid'.*objective="),
        ({"loss_type": ["sigmoid", "sft"]}, r"loss_type=\['sigmoid', 'sft'\] is not supported"),
        ({"use_weighting": True}, r"use_weighting=True is not supported: set use_weighting=False"),
        ({"f_divergence_type": "forward_kl"}, r"f_divergence_type='forward_kl'.*'reverse_kl'"),
        ({"ld_alpha": 0.5}, r"ld_alpha=0.5 is not supported: set ld_alpha=None"),
        ({"activation_offloading": True}, r"activation_offloading=True.*gradient_checkpointing=True"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_settings_that_would_be_ignored_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "activation_offloading" in options:  # TRL needs a GPU for it
        monkeypatch.setattr("trl.trainer.dpo_trainer.get_act_offloading_ctx_manager", lambda model: nullcontext())
    with pytest.raises(ValueError, match=message):
        dpo(tmp_path, SAM(), model=lora(), **options)


def test_the_users_objective(tmp_path: Path) -> None:
    """It gets TRL's batch; what TRL logs about the outputs of the model is left out, the tokens are counted."""

    def objective(model: nn.Module, batch: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        chosen, rejected = (
            logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).sum((1, 2)).chunk(2)
        )
        return (1 - 0.01 * (chosen - rejected)).relu()

    trainer = dpo(tmp_path, PerInstanceSAM(rho=0.05), model=lora(), objective=objective, max_steps=2)
    trainer.train()
    assert trainer.state.log_history[0]["num_tokens"] > 0
    assert "rewards/margins" not in trainer.state.log_history[0]


def test_capture_changes_nothing_on_the_cpu(tmp_path: Path) -> None:
    captured, eager = (dpo(tmp_path, SAM(rho=0.1), model=lora(), max_steps=2, capture=each) for each in (True, False))
    captured.train()
    eager.train()
    assert_same_bits(weights(captured.model), weights(eager.model))
    assert captured.captured.report.ordinary == 2
    assert captured.state.log_history[0]["rewards/margins"] == eager.state.log_history[0]["rewards/margins"]


def test_the_mixin_over_trls_trainer(tmp_path: Path) -> None:
    """The advice of each error leads to a class that works."""

    class Alone(MethodMixin, DPOTrainer):
        pass

    with pytest.raises(ValueError, match=r"DPOTrainer\.compute_loss.*objective=.*default_objective\(self\) of Alone"):
        dpo(tmp_path, SAM(), trainer=Alone, model=lora())
    with pytest.raises(ValueError, match=r"DPOTrainer\.training_step.*replaces = \(DPOTrainer,\) in Alone"):
        dpo(tmp_path, SAM(), trainer=Alone, model=lora(), objective=DPO())

    class Mine(MethodMixin, DPOTrainer):
        replaces = (DPOTrainer,)

        def default_objective(self) -> DPO:
            return DPO(beta=self.beta)

    trainer = dpo(tmp_path, SAM(), trainer=Mine, model=lora(), max_steps=1)
    trainer.train()
    assert trainer.objective == DPO(beta=0.5)


def test_the_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    preferences(16).to_json(tmp_path / "train.jsonl")
    monkeypatch.setattr(sys, "argv", ["trl_dpo.py", "model", "train.jsonl"])
    monkeypatch.chdir(tmp_path)
    trainer = runpy.run_path(str(REPOSITORY / "examples" / "trl_dpo.py"))["trainer"]
    assert any("rewards/margins" in entry and "sharpness" in entry for entry in trainer.state.log_history)
    assert (tmp_path / "runs" / "trl_dpo" / "adapter_model.safetensors").is_file()
