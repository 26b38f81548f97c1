"""Perturbations in lower precision: models whose weights are on a grid, and the results of float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deltasam.methods import Method
from helpers.problems import grads


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=50,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def _four_bits(w: Tensor) -> Tensor:
    """Groups of 32 with a float16 scale and offset each, as in Q4_1 of GGUF."""
    groups = w.reshape(-1, 32) if w.numel() % 32 == 0 else w.reshape(1, -1)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale, offset = ((high - low) / 15).half().float().clamp_min(1e-8), low.half().float()
    return (((groups - offset) / scale).round() * scale + offset).reshape(w.shape)


SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda w: w.bfloat16().float(),
    "fp16": lambda w: w.half().float(),
    "4-bit": _four_bits,
    "none": lambda w: w,
}
MODELS = {"llama": llama, "bert": bert}


def on_grid(model: nn.Module, source: str) -> nn.Module:
    """The model with weights as from a checkpoint of this kind."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(SOURCES[source](p))
    return model


def made(name: str, source: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = on_grid(MODELS[name](), source).train()
    ids = torch.randint(50, (6, 12))
    return model, {"input_ids": ids, "labels": ids if name == "llama" else torch.randint(2, (6,))}


def losses(outputs: Any, labels: Tensor) -> Tensor:
    from torch.nn.functional import cross_entropy

    logits = outputs.logits.float()
    if logits.ndim == 2:
        return cross_entropy(logits, labels, reduction="none")
    return cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").mean(1)


def exact(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """In float32."""
    return losses(model(input_ids=batch["input_ids"]), batch["labels"])


def with_rounded_weights(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """In float32, except that the weights of linear layers are rounded to bfloat16, to nearest, as autocast does.

    Nothing else is rounded, and the comparison with float32 is the same on every machine. Passes without a gradient
    (probes) have no autocast, and so no rounding.
    """
    if not torch.is_grad_enabled():
        return exact(model, batch)
    linear = [f"{name}." for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    cast = {n: p.bfloat16().float() for n, p in model.named_parameters() if n.startswith(tuple(linear))}
    return losses(functional_call(model, cast, (), {"input_ids": batch["input_ids"]}), batch["labels"])


@dataclass(frozen=True)
class Outcome:
    """The results of a step: the rise of the loss, the gradient, and the share of the perturbation that arrived."""

    rise: float
    gradient: Tensor
    arrived: float


def outcome(method: Method, model: nn.Module, batch: Any, objective: Any) -> Outcome:
    from deltasam import measured_arrival

    model.zero_grad()
    with measured_arrival():
        step = method.backward(model, batch, objective)
    assert step.perturbed_losses is not None
    assert step.arrived is not None
    here = objective(model, batch).detach()[: len(step.perturbed_losses)]
    rise = step.perturbed_losses.mean() - here.mean()
    gradient = torch.cat([g.flatten().float() for g in grads(model).values()])
    return Outcome(float(rise), gradient, float(step.arrived))


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))
