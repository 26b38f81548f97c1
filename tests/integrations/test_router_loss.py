"""The load-balancing loss of a mixture of experts: of the whole batch, added to the loss of every instance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from deltasam import ERM, SAM, CausalLM, DeltaSAM, Method, PerInstanceSAM, RDrop
from deltasam.integrations import MethodTrainer
from deltasam.integrations._infer import infer_objective
from deltasam.per_instance import InstancesMixedError
from deltasam.speed.splitting import Splitting
from helpers.tiny import VOCABULARY, sentences
from helpers.trainers import arguments, largest_difference, weights

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 24,
}  # fmt: skip


def qwen3_moe(**options: Any) -> Any:
    if not hasattr(hf, "Qwen3MoeForCausalLM"):
        pytest.skip("this version of transformers has no Qwen3-MoE")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    torch.manual_seed(1)
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **experts, **options))


def mixtral(**options: Any) -> Any:
    torch.manual_seed(1)
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4, **options))


def texts(n: int = 4) -> dict[str, Tensor]:
    batch = sentences(n)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def rows(n: int = 8) -> list[dict[str, Tensor]]:
    batch = texts(n)
    batch["labels"][:, 0] = -100  # transformers 4 counts the first token, which is never a target
    return [{name: value[i] for name, value in batch.items()} for i in range(n)]


@pytest.mark.parametrize("make", [qwen3_moe, mixtral])
def test_the_mean_and_the_gradient_are_the_models_own(make: Any) -> None:
    model, batch = make(output_router_logits=True, router_aux_loss_coef=0.5), texts()
    objective = infer_objective(model)
    assert objective.router_aux_loss_coef == 0.5  # type: ignore[attr-defined]
    own = model(**batch).loss
    losses = objective(model, batch)
    torch.testing.assert_close(losses.mean(), own)
    without = CausalLM()(model, batch)
    torch.testing.assert_close(losses - without, (own - without.mean()).expand(4), rtol=1e-4, atol=1e-5)
    assert float((own - without.mean()).detach()) > 0.5, "the term is there"
    own.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    ERM().backward(model, batch, objective)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_without_router_logits_there_is_none() -> None:
    model = mixtral()
    assert infer_objective(model) == CausalLM()
    model.config.output_router_logits = True
    assert infer_objective(model) == CausalLM(router_aux_loss_coef=0.001)
    assert infer_objective(model, label_smoothing=0.1) == CausalLM(label_smoothing=0.1), "Trainer leaves it out"


@pytest.mark.parametrize("method", [SAM(rho=0.0), SAM(rho=0.05), DeltaSAM(rho=0.05)], ids=str)
def test_it_trains_the_routers(method: Method, tmp_path: Path) -> None:
    ends = []
    for trainer_class, extra in ((hf.Trainer, {}), (MethodTrainer, {"method": method})):
        model = mixtral(output_router_logits=True, router_aux_loss_coef=0.5)
        args = arguments(tmp_path, optim="sgd", max_grad_norm=0.0, max_steps=2)
        trainer_class(model=model, args=args, train_dataset=rows(), **extra).train()
        ends.append(weights(model))
    if method == SAM(rho=0.0):
        assert largest_difference(*ends) < 1e-6
    else:
        assert 1e-6 < largest_difference(*ends) < 1e-1


def test_micro_batches_are_weighted_by_their_targets(tmp_path: Path) -> None:
    model = mixtral(output_router_logits=True, router_aux_loss_coef=0.5)
    options: dict[str, Any] = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1}
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, **options)
    trainer = MethodTrainer(model=model, args=args, method=ERM(), train_dataset=rows(4))
    objective, before = trainer.objective, weights(model)
    parts = list(trainer.get_train_dataloader())
    counts = [objective.items(part) for part in parts]
    for part, count in zip(parts, counts, strict=True):
        (objective(model, part).mean() * count / sum(counts)).backward()
    expected = {name: before[name] - p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    trainer.train()
    after = weights(model)
    assert largest_difference(expected, {name: after[name] for name in expected}) < 1e-6


@pytest.mark.parametrize("engine", ["auto", "low-rank", "loop"])
def test_a_perturbation_per_instance_is_refused(engine: Any) -> None:
    """A single instance has another router loss than the batch."""
    model = mixtral(output_router_logits=True)
    before = weights(model)
    with pytest.raises(InstancesMixedError, match="output_router_logits = False"):
        PerInstanceSAM(engine=engine).backward(model, texts(), infer_objective(model))
    assert largest_difference(before, weights(model)) == 0


def test_what_would_ignore_it_is_refused() -> None:
    model, batch, objective = mixtral(), texts(), CausalLM(router_aux_loss_coef=0.1)
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.1.*router_aux_loss_coef=0\)"):
        SAM().backward(model, batch, RDrop(objective))
    with pytest.raises(ValueError, match="CausalLM"):
        Splitting(SAM()).check(objective)
    plain = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match="aux_loss"):
        CausalLM(router_aux_loss_coef=0.1, predict=lambda model, batch: model(batch["input_ids"]))(plain, batch)


def test_sequence_to_sequence_models_are_refused(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "num_experts": 2}
    config = hf.SwitchTransformersConfig(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, **sizes)
    model = hf.SwitchTransformersForConditionalGeneration(config)
    model.config.output_router_logits = True
    trainer = MethodTrainer(model=model, args=arguments(tmp_path), method=SAM(), train_dataset=rows())
    with pytest.raises(ValueError, match="output_router_logits = False"):
        trainer.train()
