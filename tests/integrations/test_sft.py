"""TRL's SFTTrainer with a method."""

from __future__ import annotations

import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

pytest.importorskip("trl", reason="needs a newer transformers than the oldest one")

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from deltasam import ERM, SAM, CausalLM, DeltaSAM, Method, PerInstanceSAM, WeightAverage
from deltasam.integrations import MethodMixin, SFTMethodTrainer, WeightAverageCallback
from deltasam.per_instance import InstancesMixedError
from helpers.data import REPOSITORY
from helpers.preferences import WORDS, llama, tokenizer
from helpers.trainers import arguments, assert_same_bits, largest_difference, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*(return_outputs|label_smoothing_factor|lr_scheduler.step).*")


def rows(n: int = 20) -> Dataset:
    """Prompts, which are not targets, and completions of very different lengths."""
    ends = ["d", "e", "f", "g", "h"]
    return Dataset.from_list([
        {"prompt": "a b" + " c" * (i % 3), "completion": " " + " ".join(ends[i % 5 :] * (1 + i % 2))}
        for i in range(n)
    ])  # fmt: skip


def fresh(dropout: float = 0.1) -> hf.PreTrainedModel:
    return llama(dropout)


def sft(folder: Path, method: Method | None, *, model: Any = None, objective: Any = None, **options: Any) -> Any:
    """A trainer in float32 with SGD, whose weights show the gradients."""
    defaults = {
        "kind": SFTConfig,
        "bf16": False,
        "gradient_checkpointing": False,
        "optim": "sgd",
        "max_grad_norm": 0.0,
    }
    peft = options.pop("peft_config", None)
    given = {"model": model or fresh(), "args": arguments(folder, **(defaults | options)), "train_dataset": rows(),
             "eval_dataset": rows(8), "processing_class": tokenizer(), "peft_config": peft}  # fmt: skip
    if method is None:
        return SFTTrainer(**given)
    return SFTMethodTrainer(**given, method=method, objective=objective)


def trained(*args: Any, **options: Any) -> dict[str, Tensor]:
    trainer = sft(*args, **options)
    trainer.train()
    return weights(trainer.model)


@pytest.mark.parametrize(
    ("options", "dropout"),
    # With smoothing TRL makes one more forward in every step, whose dropout advances the generator.
    [({}, 0.1), ({"gradient_accumulation_steps": 3}, 0.1), ({"label_smoothing_factor": 0.1}, 0.0)],
    ids=str,
)
def test_without_a_perturbation_it_is_the_plain_trainer(
    options: dict[str, Any], dropout: float, tmp_path: Path
) -> None:
    def by(method: Method | None) -> dict[str, Tensor]:
        return trained(tmp_path, method, model=fresh(dropout), **options)

    plain = by(None)
    assert largest_difference(plain, by(ERM())) < 1e-6
    assert largest_difference(plain, by(SAM(rho=0.0))) < 1e-6
    assert largest_difference(plain, by(SAM(rho=0.05))) > 1e-5


def test_it_minimizes_the_loss_of_the_completions(tmp_path: Path) -> None:
    """One step of SAM by hand: the tokens of the prompts are not targets."""
    model = fresh(dropout=0.0).double()
    options: dict[str, Any] = {"max_steps": 1, "learning_rate": 0.5, "lr_scheduler_type": "constant"}
    trainer = sft(tmp_path, SAM(rho=0.1), model=model, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    assert (batch["labels"] == -100).any(), "prompts or padding"
    before = weights(model)

    def gradient() -> dict[str, Tensor]:
        model.zero_grad()
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        flat, labels = logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        torch.nn.functional.cross_entropy(flat, labels).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    first = gradient()
    length = torch.stack([g.norm() for g in first.values()]).norm()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p += 0.1 * first[name] / length
    second = gradient()
    model.load_state_dict(before)
    model.zero_grad()
    trainer = sft(tmp_path, SAM(rho=0.1), model=model, **options)
    trainer.train()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - 0.5 * second[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", [DeltaSAM(rho=0.05), PerInstanceSAM(rho=0.05)], ids=lambda m: type(m).__name__)
def test_common_settings(method: Method, tmp_path: Path) -> None:
    """bfloat16, checkpointing and LoRA, SFTConfig's defaults or common settings; evaluation and resume."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    options: dict[str, Any] = {
        "bf16": True, "gradient_checkpointing": True, "optim": "adamw_torch", "max_grad_norm": 1.0,
        "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3,
        "logging_strategy": "steps", "logging_steps": 1, "peft_config": lora,
    }  # fmt: skip
    trainer = sft(tmp_path / "whole", method, **options)
    trainer.train()
    logged = trainer.state.log_history
    assert "sharpness" in logged[0]
    (first, _) = [entry for entry in logged if "eval_loss" in entry]
    assert "eval_mean_token_accuracy" in first
    assert first["eval_num_tokens"] == logged[2]["num_tokens"], "those of the training so far"
    again = sft(tmp_path / "whole", method, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same_bits(weights(trainer.model), weights(again.model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "dft"}, r"loss_type='dft'.*loss_type='nll', or pass objective="),
        ({"activation_offloading": True}, r"activation_offloading=True.*gradient_checkpointing=True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_would_be_ignored_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "activation_offloading" in options:  # TRL needs a GPU for it
        monkeypatch.setattr("trl.trainer.sft_trainer.get_act_offloading_ctx_manager", lambda model: nullcontext())
    with pytest.raises(ValueError, match=message):
        sft(tmp_path, SAM(), **options)


def routed() -> hf.PreTrainedModel:
    """A tiny Qwen3-MoE, or a Mixtral if transformers lacks it."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    common: dict[str, Any] = {"vocab_size": len(WORDS), "num_key_value_heads": 1, **sizes}
    if not hasattr(hf, "Qwen3MoeForCausalLM"):
        return hf.MixtralForCausalLM(hf.MixtralConfig(num_local_experts=4, **common))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**common, **experts))


@pytest.mark.skipif(not hasattr(SFTConfig, "router_aux_loss_coef"), reason="older versions use the model's")
@pytest.mark.parametrize("factor", [None, 0.5, 0.0], ids=lambda value: f"factor {value}")
def test_the_router_loss_is_trls(factor: float | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"router_aux_loss_coef": factor, "max_steps": 2}
    trainer = sft(tmp_path, SAM(rho=0.0), model=routed(), **options)
    assert trainer.objective == CausalLM(router_aux_loss_coef=0.001 if factor is None else factor)
    trainer.train()
    plain = trained(tmp_path, None, model=routed(), **options)
    assert largest_difference(plain, weights(trainer.model)) < 1e-6
    if factor:
        without = trained(tmp_path, None, model=routed(), **(options | {"router_aux_loss_coef": 0.0}))
        assert largest_difference(plain, without) > 1e-5, "the term is felt"
    sft(tmp_path, DeltaSAM(rho=0.05), model=routed(), **options).train()


@pytest.mark.skipif(not hasattr(SFTConfig, "router_aux_loss_coef"), reason="older versions use the model's")
def test_without_the_router_loss(tmp_path: Path) -> None:
    smoothed = sft(tmp_path, SAM(), model=routed(), label_smoothing_factor=0.1)
    assert smoothed.objective == CausalLM(label_smoothing=0.1), "TRL's smoothed loss has none"
    assert sft(tmp_path, SAM(), model=routed(), objective=CausalLM()).objective == CausalLM()
    with pytest.raises(InstancesMixedError, match=r"SFTConfig\(router_aux_loss_coef=0\.0\)"):
        sft(tmp_path, PerInstanceSAM(), model=routed()).train()


def test_prompt_tuning(tmp_path: Path) -> None:
    """The targets are the completions, which the virtual tokens do not change."""
    peft = pytest.importorskip("peft")

    def by(method: Method | None) -> dict[str, Tensor]:
        torch.manual_seed(2)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return trained(tmp_path, method, model=fresh(0.0), peft_config=config, max_steps=3)

    plain = by(None)
    assert largest_difference(plain, by(ERM())) < 1e-6
    assert largest_difference(plain, by(SAM(rho=0.0))) < 1e-6
    assert largest_difference(plain, by(SAM(rho=0.5))) > 1e-6


TEMPLATE = (
    "{% for each in messages %}{% if each['role'] == 'assistant' %}{% generation %}{{ each['content'] + ' <eos>' }}"
    "{% endgeneration %}{% else %}{{ each['content'] + ' ' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("packing", [False, True])
def test_assistant_only_loss(packing: bool, tmp_path: Path) -> None:
    """Only the tokens of the assistant, with the end of its turn, are targets."""
    talks = [["a b", "d e", "c", "f g h"], ["a c", "h g f e"], ["b", "d", "a", "e", "c", "f"]] * 4
    roles = ("user", "assistant")
    messages = [{"messages": [{"role": roles[k % 2], "content": t} for k, t in enumerate(talk)]} for talk in talks]
    chat = tokenizer()
    chat.chat_template = TEMPLATE
    options: dict[str, Any] = {
        "kind": SFTConfig, "bf16": False, "gradient_checkpointing": False, "optim": "sgd", "max_grad_norm": 0.0,
        "assistant_only_loss": True, "packing": packing, "max_length": 32, "max_steps": 3,
    }  # fmt: skip

    def run(kind: Any, **more: Any) -> Any:
        args, data = arguments(tmp_path, **options), Dataset.from_list(messages)
        trainer = kind(model=fresh(0.0), args=args, train_dataset=data, processing_class=chat, **more)
        trainer.train()
        return trainer

    plain, ours = run(SFTTrainer), run(SFTMethodTrainer, method=SAM(rho=0.0))
    batch = next(iter(ours.get_train_dataloader()))
    targets = batch["labels"][batch["labels"] != -100]
    users = {WORDS[letter] for letter in "abc"}
    assert len(targets) > 0
    assert not users & set(targets.tolist()), "the letters of the user"
    assert WORDS["<eos>"] in targets
    assert largest_difference(weights(plain.model), weights(ours.model)) < 1e-6
    assert run(SFTMethodTrainer, method=PerInstanceSAM(rho=0.05, engine="low-rank")).state.global_step == 3


def test_wrapped_packing_and_the_users_objective(tmp_path: Path) -> None:
    packed = {"packing": True, "packing_strategy": "wrapped", "max_length": 8, "max_steps": 2}
    assert trained(tmp_path, DeltaSAM(), **packed)
    found: list[int] = []

    class Counted(CausalLM):
        def __call__(self, model: Any, batch: Any) -> Tensor:
            found.append(len(batch["input_ids"]))
            return super().__call__(model, batch)

    assert trained(tmp_path, SAM(), objective=Counted(), loss_type="dft", max_steps=1)
    assert found == [4, 4]


def test_the_mixin_alone_does_not_know_trls_loss(tmp_path: Path) -> None:
    class Mine(MethodMixin, SFTTrainer):
        pass

    with pytest.raises(ValueError, match=r"SFTTrainer\.compute_loss.*objective="):
        Mine(model=fresh(), args=arguments(tmp_path, kind=SFTConfig), method=SAM())


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from deltasam import integrations

    monkeypatch.delitem(sys.modules, "deltasam.integrations._sft")
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ModuleNotFoundError, match=r"SFTMethodTrainer needs trl: pip install 'deltasam\[trl\]'"):
        _ = integrations.SFTMethodTrainer


def test_the_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows(16).to_json(tmp_path / "train.jsonl")
    monkeypatch.setattr(sys, "argv", ["trl_sft.py", "model", "train.jsonl"])
    monkeypatch.chdir(tmp_path)
    trainer = runpy.run_path(str(REPOSITORY / "examples" / "trl_sft.py"))["trainer"]
    assert any("sharpness" in entry for entry in trainer.state.log_history)
    assert (tmp_path / "runs" / "trl_sft" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("method", [None, SAM(rho=0.1)], ids=["plain", "sam"])
def test_an_average_of_adapters_is_evaluated_and_kept(method: Method | None, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    seen: list[dict[str, Tensor]] = []

    class Noting(hf.TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            seen.append({name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})

    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = sft(tmp_path, method, peft_config=lora, eval_strategy="steps", eval_steps=2, learning_rate=1.0)
    average = WeightAverageCallback(WeightAverage(kind="swa", start=0.5))
    for callback in (Noting(), average):
        trainer.add_callback(callback)
    trainer.train()
    assert (len(seen), average.average.count) == (6, 3)
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.detach(), torch.stack([each[name] for each in seen[3:]]).mean(0))
    assert all("lora_" in name for name in seen[0])
    assert largest_difference(seen[3], seen[5]) > 1e-6
