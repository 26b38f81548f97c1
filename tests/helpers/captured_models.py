"""Small Hugging Face models for captured steps: random weights, no dropout, each with a batch and its objective.

Needs only torch and transformers; LoRA is that of peft if it is installed.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import ERM, Method
from deltasam.objectives import CausalLM, Classification, Seq2Seq
from deltasam.speed.capture import Captured, CaptureReport
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
    """A model of the table. ``params`` overrides the parameters that a method perturbs."""

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
        # The weights are small, and the radius of ASAM is relative to them; noise and low rank need a larger one.
        rho = {"asam": 1.5, "random-all": 4.0, "bi-lora": 1.0}.get(row.name, 0.5)
        made = row.method(**({} if row.rho is None else {"rho": rho}))
        if self.params is not None:
            made = made.replace(params=self.params)
        weighting = getattr(made, "weighting", None)
        return made if weighting is None else made.replace(weighting=_above_rounding(weighting))

    def tolerance(self, row: Row, *, bf16: bool) -> float:
        """The largest allowed difference of two steps, relative to the norm of the gradient.

        In bfloat16 the perturbed weights are rounded, with different random bits. Second differences of losses lose
        half the digits of float32. Without its perturbation a step would differ by 0.3 or more.
        """
        if bf16:
            return 0.08
        weighting = getattr(row.method(), "weighting", None)
        return 2e-3 if isinstance(weighting, (FiniteDifference, RandomWeights)) else 1e-4

    def __str__(self) -> str:
        return self.name


def _above_rounding(weighting: Any) -> Any:
    """At the radius of the paper a second difference in float32 is noise, which differs between implementations."""
    if isinstance(weighting, FiniteDifference):
        return replace(weighting, radius=2.0)
    return replace(weighting, of=_above_rounding(weighting.of)) if isinstance(weighting, RandomWeights) else weighting


def _hf(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


def mpnet() -> nn.Module:
    """MPNet; older versions of transformers compute its positions on the host, which cannot be recorded."""
    model = _hf("MPNetForSequenceClassification", "MPNetConfig", **_ENCODER)()
    encoder: Any = model.mpnet.encoder
    if ".to(x.device)" in inspect.getsource(encoder.compute_position_bias):

        def on_the_device(x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32) -> Tensor:
            places = torch.arange(x.size(1), device=x.device)
            buckets = encoder.relative_position_bucket(places[None, :] - places[:, None], num_buckets=num_buckets)
            values = encoder.relative_attention_bias(buckets).permute([2, 0, 1]).unsqueeze(0)
            return values.expand((x.size(0), -1, x.size(1), x.size(1))).contiguous()

        encoder.compute_position_bias = on_the_device
    return model


def distilbert() -> nn.Module:
    """Away from the kinks of the ReLU in its head, which rounding to bfloat16 would cross in some steps."""
    build = _hf(
        "DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=VOCABULARY, dim=16, n_layers=2,
        n_heads=2, hidden_dim=32, max_position_embeddings=24, pad_token_id=1, dropout=0.0, attention_dropout=0.0,
        seq_classif_dropout=0.0, num_labels=3,
    )  # fmt: skip
    model = build()
    nn.init.constant_(model.pre_classifier.bias, 2.0)
    return model


class LoraLinear(nn.Module):
    """A linear layer with a low-rank adapter, with the names of peft."""

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


@cache
def _smol(device: torch.device | str, **smaller: int) -> nn.Module:
    torch.manual_seed(0)
    return _hf("LlamaForCausalLM", "LlamaConfig", **_SMOL | smaller)().to(device).train()


def smol(device: torch.device | str, **smaller: int) -> nn.Module:
    """SmolLM2-135M with random weights; smaller without a GPU."""
    return copy.deepcopy(_smol(device, **smaller))


LLAMA = Case("Llama", _hf("LlamaForCausalLM", "LlamaConfig", **_DECODER), CausalLM())
CASES = [
    Case("BERT", _hf("BertForSequenceClassification", "BertConfig", **_ENCODER), Classification()),
    Case("RoBERTa", _hf("RobertaForSequenceClassification", "RobertaConfig", **_ENCODER), Classification()),
    Case("MPNet", mpnet, Classification()),
    Case("DistilBERT", distilbert, Classification()),
    Case("GPT-2", _hf("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2,
                      n_positions=24, bos_token_id=2, eos_token_id=2, pad_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0,
                      attn_pdrop=0.0), CausalLM()),
    LLAMA,
    # RMSNorm weights of 10 and matrices of 150 entries, which the fused kernel does not support
    Case("Llama, odd sizes", _hf("LlamaForCausalLM", "LlamaConfig", **{**_DECODER, "hidden_size": 10, "head_dim": 4,
                                                                       "intermediate_size": 15}), CausalLM()),
    Case("Qwen2", _hf("Qwen2ForCausalLM", "Qwen2Config", **_DECODER), CausalLM()),
    Case("Mistral", _hf("MistralForCausalLM", "MistralConfig", **_DECODER), CausalLM()),
    Case("T5", _hf("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32,
                   num_layers=2, num_heads=2, relative_attention_num_buckets=4, pad_token_id=1,
                   decoder_start_token_id=1, dropout_rate=0.0, initializer_factor=0.1), Seq2Seq()),
    Case("Llama + LoRA (adapters)", lora, CausalLM()),
    Case("Llama + LoRA (base matrices)", lambda: lora(base=True), CausalLM(), is_adapted),
]  # fmt: skip
CAPTURABLE = [row for row in ROWS if row.method().capturable]


@dataclass(frozen=True)
class Comparison:
    """A captured method after ordinary and two replayed steps, against ordinary steps.

    The first step is ordinary, and perhaps the second, see :func:`ordinary_steps`.

    Differences are norms over all parameters, relative to the ordinary gradient.
    """

    report: CaptureReport
    ordinary: int  # the number of ordinary steps
    difference: float
    from_plain: float | None  # the difference to a step without perturbation; None for plain training
    losses: float  # the largest difference of a loss at w
    intact: bool  # whether the weights were restored bit for bit

    def check(self, tolerance: float) -> None:
        """Raises an AssertionError unless the step was replayed and equals the ordinary one within a tolerance."""
        assert self.report.obstacles == {}
        assert (self.report.ordinary, self.report.recorded, self.report.replayed) == (self.ordinary, 1, 2)
        assert self.intact
        assert self.losses < tolerance
        assert self.difference < tolerance
        assert self.from_plain is None or self.from_plain > 3 * tolerance


def ordinary_steps(method: Method) -> int:
    """How many steps are ordinary: two if the first one allocates buffers, or is of its own kind."""
    return 2 if method.buffers or method.replace(state={}).capture_key() is False else 1


def compare(case: Case, row: Row, device: torch.device | str = "cpu", *, bf16: bool = False) -> Comparison:
    model, objective = case.model(device), case.objective
    before = {name: (p.detach().clone(), p.data_ptr()) for name, p in model.named_parameters()}
    captured, method = Captured(case.method(row)), case.method(row)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=bf16):
        first = ordinary_steps(method)
        for number in range(first + 2):
            model.zero_grad()
            batch = case.batch(device, seed=number)
            step = captured.backward(model, batch, objective)
        found = _gradients(model)
        for number in range(first + 1) if method.buffers else ():
            method.backward(model, case.batch(device, seed=number), objective)
        method.load_state_dict(method.state_dict() | {"steps": first + 1})  # seeds and phases are those of the step
        model.zero_grad()
        ordinary = method.backward(model, batch, objective)
        wanted = _gradients(model)
        model.zero_grad()
        ERM().backward(model, batch, objective)
        plain = _gradients(model)
        model.zero_grad()
    return Comparison(
        report=captured.report,
        ordinary=first,
        difference=_difference(found, wanted),
        from_plain=None if method.is_erm() else _difference(plain, wanted),
        losses=float((step.losses - ordinary.losses).abs().max()),
        intact=all(torch.equal(p, before[n][0]) and p.data_ptr() == before[n][1] for n, p in model.named_parameters()),
    )


def trajectory(method: Method, model: nn.Module, optimizer: Any, batches: list[Any], *, capture: bool) -> Trajectory:
    """Trains with clipping and an optimizer, as a captured whole step or in a plain loop."""
    captured = Captured(method, optimizer=optimizer, max_grad_norm=1.0)
    losses, perturbed = [], []
    for batch in batches:
        if capture:
            step = captured.step(model, batch, CausalLM())
        else:
            step = method.backward(model, batch, CausalLM())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert step.perturbed_losses is not None
        losses.append(step.losses.mean())
        perturbed.append(step.perturbed_losses.mean())
    first = ordinary_steps(method)
    return Trajectory(torch.stack(losses).cpu(), torch.stack(perturbed).cpu(), captured.report, first)


@dataclass(frozen=True)
class Trajectory:
    """The mean losses of the steps, at w and perturbed."""

    losses: Tensor
    perturbed: Tensor
    report: CaptureReport
    first: int  # ordinary steps before the recording

    def check(self, ordinary: Trajectory, tolerance: float) -> None:
        """Raises an AssertionError unless all later steps were replayed, and the losses agree and fall."""
        steps = len(self.losses)
        assert self.report.obstacles == {}
        done = self.report.ordinary, self.report.recorded, self.report.replayed
        assert done == (self.first, 1, steps - self.first)
        # Means of five steps: training magnifies rounding, and single losses are noisy.
        mine, others = (each.losses[: steps // 5 * 5].view(-1, 5).mean(1) for each in (self, ordinary))
        torch.testing.assert_close(mine, others, rtol=tolerance, atol=0)
        assert ordinary.losses[-1] < (1 - 3 * tolerance) * ordinary.losses[0]
        rise, meant = (float((each.perturbed - each.losses).mean()) for each in (self, ordinary))
        assert meant > 0.01
        assert rise == pytest.approx(meant, rel=5 * tolerance)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    a, b = (torch.cat([gradients[name].double().flatten() for name in wanted]) for gradients in (found, wanted))
    return float((a - b).norm() / b.norm())
