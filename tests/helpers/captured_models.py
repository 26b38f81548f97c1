"""Small Hugging Face models for captured steps: random weights, no dropout, each with a batch and its objective.

Needs torch and transformers only; LoRA is peft's where it is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.methods import Method
from deltasam.objectives import CausalLM, Classification, Seq2Seq
from deltasam.weighting import FiniteDifference, RandomWeights
from helpers.rows import ROWS, Row

VOCABULARY, LENGTH = 32, 8
_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 24, "pad_token_id": 1, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "num_labels": 3,
}  # fmt: skip
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 24, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
_SMOL = {
    "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip


def batch(n: int = 4, length: int = LENGTH, vocabulary: int = VOCABULARY, *, tokens: bool, seed: int = 0) -> Any:
    """Sequences of different lengths, padded on the right; the labels are classes, or the tokens themselves."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (n, length), generator=generator)
    mask = torch.ones_like(ids)
    for i in range(n):
        mask[i, length - i % 3 :] = 0
    ids = torch.where(mask == 1, ids, torch.ones_like(ids))
    labels = torch.where(mask == 1, ids, torch.full_like(ids, -100)) if tokens else torch.arange(n) % 3
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def to(values: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in values.items()}


@dataclass(frozen=True)
class Case:
    """A model of the table. ``params`` is what a method perturbs, if not what its row says."""

    name: str
    build: Callable[[], nn.Module]
    objective: Any
    params: Callable[[str, nn.Parameter], bool] | None = None

    @cache  # noqa: B019 - for the session: steps leave the weights as they are, and building takes longer than a step
    def model(self, device: torch.device | str = "cpu") -> nn.Module:
        torch.manual_seed(0)
        model = self.build()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))  # weights near zero would make a model that is nearly linear
        return model.to(device).train()

    def batch(self, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        return to(batch(tokens=not isinstance(self.objective, Classification), seed=seed), device)

    def method(self, row: Row) -> Method:
        """The method of a row, with a radius at which its gradient is clearly not the plain one."""
        changes: dict[str, Any] = {} if row.rho is None else {"rho": 0.5}
        made = row.method(**changes)
        if self.params is not None:
            made = made.replace(params=self.params)
        weighting = getattr(made, "weighting", None)
        return made if weighting is None else made.replace(weighting=_above_rounding(weighting))

    def __str__(self) -> str:
        return self.name


def _above_rounding(weighting: Any) -> Any:
    """At the radius of the paper a second difference in float32 is noise, which no two ways of computing share."""
    if isinstance(weighting, FiniteDifference):
        return replace(weighting, radius=2.0)
    return replace(weighting, of=_above_rounding(weighting.of)) if isinstance(weighting, RandomWeights) else weighting


def _hf(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


class LoraLinear(nn.Module):
    """A linear layer with a low-rank adapter, whose parts have the names that peft gives them."""

    def __init__(self, base_layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.lora_B["default"](self.lora_A["default"](x)) * self.scaling
        return self.base_layer(x) + adapted


_TARGETS = ("q_proj", "v_proj")


def lora(base: bool = False) -> nn.Module:
    """The small Llama with adapters; with ``base`` the adapted matrices are trained too."""
    model = LLAMA.build()
    if importlib.util.find_spec("peft") is not None:
        import peft

        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(_TARGETS), task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    else:
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name in _TARGETS:
                if isinstance(getattr(module, name, None), nn.Linear):
                    setattr(module, name, LoraLinear(getattr(module, name), rank=4, alpha=8))
    for name, p in model.named_parameters():
        if base and is_adapted(name, p):
            p.requires_grad_(True)
    return model


def is_adapted(name: str, p: nn.Parameter) -> bool:
    return "base_layer.weight" in name


def smol(layers: int = 30, width: int = 576) -> nn.Module:
    """SmolLM2-135M's shape, random weights; fewer layers and a smaller width to try it out without a GPU."""
    sizes = {**_SMOL, "num_hidden_layers": layers, "hidden_size": width, "vocab_size": 49152 if width == 576 else 64}
    return _hf("LlamaForCausalLM", "LlamaConfig", **sizes)()


LLAMA = Case("Llama", _hf("LlamaForCausalLM", "LlamaConfig", **_DECODER), CausalLM())
CASES = [
    Case("BERT", _hf("BertForSequenceClassification", "BertConfig", **_ENCODER), Classification()),
    Case("RoBERTa", _hf("RobertaForSequenceClassification", "RobertaConfig", **_ENCODER), Classification()),
    Case("MPNet", _hf("MPNetForSequenceClassification", "MPNetConfig", **_ENCODER), Classification()),
    Case("DistilBERT", _hf("DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=VOCABULARY, dim=16,
                           n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=24, pad_token_id=1,
                           dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=3),
         Classification()),
    Case("GPT-2", _hf("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2,
                      n_positions=24, bos_token_id=2, eos_token_id=2, pad_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0,
                      attn_pdrop=0.0), CausalLM()),
    LLAMA,
    # RMSNorm weights of 10 and matrices of 150 entries: those the fused kernel does not take
    Case("Llama, odd sizes", _hf("LlamaForCausalLM", "LlamaConfig", **{**_DECODER, "hidden_size": 10, "head_dim": 4,
                                                                       "intermediate_size": 15}), CausalLM()),
    Case("Qwen2", _hf("Qwen2ForCausalLM", "Qwen2Config", **_DECODER), CausalLM()),
    Case("Mistral", _hf("MistralForCausalLM", "MistralConfig", **_DECODER), CausalLM()),
    Case("T5", _hf("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32,
                   num_layers=2, num_heads=2, relative_attention_num_buckets=4, pad_token_id=1,
                   decoder_start_token_id=1, dropout_rate=0.0), Seq2Seq()),
    Case("Llama + LoRA (adapters)", lora, CausalLM()),
    Case("Llama + LoRA (base matrices)", lambda: lora(base=True), CausalLM(), is_adapted),
]  # fmt: skip
CAPTURABLE = [row for row in ROWS if row.method().capturable]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The norm of the difference over the norm of what is wanted, all parameters together."""
    assert found.keys() == wanted.keys()
    squares = sum(float((found[n] - wanted[n]).double().square().sum()) for n in wanted)
    return float((squares / sum(float(g.double().square().sum()) for g in wanted.values())) ** 0.5)
