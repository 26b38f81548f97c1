"""Tiny language models with adapters of PEFT, in float64, away from the zero matrices that adapters start with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from helpers.captured_models import CASES, batch

TARGETS = {
    "Llama": ["q_proj", "v_proj", "down_proj"],
    "GPT-2": ["c_attn", "mlp.c_proj"],
    "T5": ["q", "v"],
    "BERT": ["query", "value"],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "embeddings": {},
}
TABLES = {"Llama": "embed_tokens", "GPT-2": "wte", "T5": "shared", "BERT": "word_embeddings"}
KINDS = {"Llama": "CAUSAL_LM", "GPT-2": "CAUSAL_LM", "T5": "SEQ_2_SEQ_LM", "BERT": "SEQ_CLS"}
Objective = Callable[[nn.Module, Any], Tensor]


def adapted(name: str, variant: str = "LoRA", seed: int = 0, **options: Any) -> nn.Module:
    import peft

    case = next(case for case in CASES if case.name == name)
    torch.manual_seed(seed)
    targets = TARGETS[name] + ([TABLES[name]] if variant == "embeddings" else [])
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=targets, task_type=KINDS[name], fan_in_fan_out=name == "GPT-2",
        **{**VARIANTS[variant], **options},
    )  # fmt: skip
    model = peft.get_peft_model(case.build(), config).double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def task(name: str, seed: int = 0) -> tuple[dict[str, Tensor], Objective]:
    objective = next(case for case in CASES if case.name == name).objective
    return batch(tokens=name != "BERT", seed=seed), objective
