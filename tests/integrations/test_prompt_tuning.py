"""PEFT's prompt learning with causal language models: logits of virtual tokens in front of those of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

pytest.importorskip("peft", reason="peft is not installed (extra peft)")

import peft

from deltasam import ERM, SAM, CausalLM, DeltaSAM, Method, PerInstanceSAM, RDrop
from deltasam.integrations import MethodTrainer
from deltasam.integrations._infer import infer_objective
from deltasam.step.selection import select
from helpers.tiny import causal, sentences
from helpers.trainers import arguments, largest_difference, weights

VIRTUAL = 3
CONFIGS: dict[str, Any] = {
    "prompt": peft.PromptTuningConfig,
    "p-tuning": lambda **o: peft.PromptEncoderConfig(encoder_hidden_size=8, **o),
    "prefix": peft.PrefixTuningConfig,
    "multitask": lambda **o: peft.MultitaskPromptTuningConfig(num_tasks=2, num_ranks=1, **o),
}


def tuned(config: str = "prompt", kind: str = "llama") -> Any:
    torch.manual_seed(3)
    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": VIRTUAL}
    return peft.get_peft_model(causal(kind), CONFIGS[config](**options)).eval()


def texts(n: int = 4, *, side: str = "right", seed: int = 0) -> dict[str, Tensor]:
    """Padded texts of different lengths; every token is a target."""
    batch = sentences(n, seed=seed)
    if side == "left":
        batch = {name: value.flip(1) for name, value in batch.items()}
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def rows(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: value[i] for name, value in batch.items()} for i in range(len(batch["labels"]))]


def with_tasks(config: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "task_ids": torch.arange(len(batch["labels"])) % 2} if config == "multitask" else batch


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("config", list(CONFIGS))
def test_the_mean_is_the_models_own_loss(config: str, kind: str, side: str) -> None:
    model, batch = tuned(config, kind), with_tasks(config, texts(side=side))
    objective = infer_objective(model)
    losses = objective(model, batch)
    torch.testing.assert_close(losses.mean(), model(**batch).loss, rtol=1e-6, atol=1e-6)
    # Each loss is that of its sequence alone, times the share of its target tokens.
    alone = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(4)]
    counts = torch.stack([objective.items(one) for one in alone])  # type: ignore[arg-type]
    own = torch.stack([model(**one).loss for one in alone])
    torch.testing.assert_close(losses, 4 * own * counts / counts.sum(), rtol=1e-5, atol=1e-6)
    assert int(objective.items(batch)) == int(counts.sum())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "method", [SAM(rho=0.05), DeltaSAM(rho=0.05), PerInstanceSAM(rho=0.05)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("config", list(CONFIGS))
def test_it_trains(config: str, method: Method, tmp_path: Path) -> None:
    model = tuned(config)
    data = rows(with_tasks(config, texts(8)))
    args = arguments(tmp_path, max_steps=2, remove_unused_columns=False)
    before = weights(model)
    MethodTrainer(model=model, args=args, method=method, train_dataset=data).train()
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert moved
    assert all("prompt_encoder" in name for name in moved), "the model itself is frozen"


def test_accumulation_weighs_all_targets(tmp_path: Path) -> None:
    """The first tokens are also targets; with rows of different lengths their number matters."""
    ends = []
    for size, steps in ((8, 1), (2, 4)):
        model = tuned().double()
        options: dict[str, Any] = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1}
        args = arguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=steps, data_seed=7, **options
        )
        MethodTrainer(model=model, args=args, method=ERM(), train_dataset=rows(texts(8))).train()
        ends.append(weights(model))
    assert largest_difference(ends[0], weights(tuned().double())) > 1e-4
    assert largest_difference(*ends) < 1e-10


def test_both_engines_agree() -> None:
    model, batch = tuned("p-tuning").double(), texts()
    found = []
    for engine in ("auto", "loop"):
        model.zero_grad()
        PerInstanceSAM(rho=0.05, engine=engine).backward(model, batch, infer_objective(model))  # type: ignore[arg-type]
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("config", list(CONFIGS))
def test_prompts_are_adapters(config: str) -> None:
    model = tuned(config)
    assert select(model, "adapters").keys() == select(model, "trained").keys()


def test_regularisers_see_the_logits_of_the_targets() -> None:
    """Without dropout the two passes of R-Drop are equal, and its loss is that of one pass."""
    model, batch = tuned(), texts()
    objective = infer_objective(model)
    torch.testing.assert_close(RDrop(objective)(model, batch), objective(model, batch))


def test_without_the_setting_an_error_names_it() -> None:
    model, batch = tuned(), texts()
    with pytest.raises(ValueError, match=r"\(4, 10, .*\(4, 7\).*CausalLM\(virtual_tokens="):
        CausalLM()(model, batch)
    for wrong in (2, 4):
        with pytest.raises(ValueError, match=rf"virtual_tokens={wrong}"):
            CausalLM(virtual_tokens=wrong)(model, batch)
    with pytest.raises(ValueError, match=r"virtual_tokens.*-1"):
        CausalLM(virtual_tokens=-1)


def test_cpt_is_refused(tmp_path: Path) -> None:
    if not hasattr(peft, "CPTConfig"):
        pytest.skip("this version of peft has no CPT")
    config = peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2])
    model = peft.get_peft_model(causal("llama"), config)
    trainer = MethodTrainer(model=model, args=arguments(tmp_path), method=SAM(), train_dataset=rows(texts()))
    with pytest.raises(ValueError, match=r"CPT .* pass the objective"):
        trainer.train()


def test_evaluation_is_the_plain_trainers(tmp_path: Path) -> None:
    data = rows(texts(8, seed=2))
    args = arguments(tmp_path)
    ours = MethodTrainer(model=tuned(), args=args, method=SAM(), eval_dataset=data).evaluate()
    plain = hf.Trainer(model=tuned(), args=args, eval_dataset=data).evaluate()
    assert ours["eval_loss"] == plain["eval_loss"]
