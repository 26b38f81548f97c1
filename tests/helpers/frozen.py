"""Small models with adapters around frozen weights, and the slow reference: a copy whose frozen weights move."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from helpers.architectures import BY_NAME, VOCABULARY, Architecture, per_token, text
from helpers.instance_reference import Exact, groups_of
from helpers.problems import Problem, TinyTransformer, token_ids

Run = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Family:
    """An architecture, the layers that get adapters, a part to train as a whole, and options of every adapter."""

    architecture: Architecture
    targets: tuple[str, ...]
    saved: str
    task: str = "CAUSAL_LM"
    fan_in_fan_out: bool = False

    @property
    def tolerance(self) -> float:
        return self.architecture.tolerance


def _mistral() -> nn.Module:
    import transformers

    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, max_position_embeddings=16, pad_token_id=1, bos_token_id=2, eos_token_id=2,
        attention_dropout=0.1, sliding_window=4,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config)


_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "Llama": Family(BY_NAME["Llama"], _LLAMA, "lm_head"),
    "Qwen2": Family(BY_NAME["Qwen2"], _LLAMA, "lm_head"),  # its projections have biases
    "Mistral": Family(Architecture("Mistral", _mistral, text, per_token, 1e-6), _LLAMA, "lm_head"),
    "GPT-2": Family(BY_NAME["GPT-2"], ("c_attn", "c_proj", "c_fc"), "ln_f", fan_in_fan_out=True),  # Conv1D
    "T5": Family(BY_NAME["T5"], ("q", "k", "v", "o", "wi", "wo"), "final_layer_norm", "SEQ_2_SEQ_LM"),
    "BERT": Family(BY_NAME["BERT"], ("query", "key", "value", "dense"), "classifier", "SEQ_CLS"),
}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_dropout": 0.1},
    "LoRA without dropout": {},
    "DoRA": {"use_dora": True},  # uses the output of the base
    "DoRA with dropout": {"use_dora": True, "lora_dropout": 0.1},  # multiplies by its weight once more
    "rsLoRA": {"use_rslora": True, "lora_dropout": 0.1},
    "modules_to_save": {"lora_dropout": 0.1},
}


def adapted(family: str, kind: str = "LoRA", *, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """The model with adapters around its linear layers, in train mode; all of its weights are random."""
    import peft

    own = FAMILIES[family]
    torch.manual_seed(seed)
    saved = {"modules_to_save": [own.saved]} if kind == "modules_to_save" else {}
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=list(own.targets), task_type=own.task, fan_in_fan_out=own.fan_in_fan_out,
        **saved, **KINDS[kind],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft about what it chooses by itself
        model = peft.get_peft_model(own.architecture.build(), config).to(dtype).train()
    return randomised(model)


def randomised(model: nn.Module) -> nn.Module:
    """Other values where a new model has zeros or ones, which would hide mistakes: LoRA's B, biases, scales."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name and p.ndim > 1:
                p.copy_(0.3 * torch.randn_like(p))
            elif p.ndim == 1 and p.is_floating_point():
                p.mul_(1 + 0.1 * torch.rand_like(p)).add_(0.1 * torch.randn_like(p))
    return model


def run_of(family: str, n: int, seed: int = 3) -> tuple[Run, Any, Any]:
    """A pass over the whole batch with the same random draws every time; the batch; and the objective."""
    own = FAMILIES[family].architecture
    torch.manual_seed(seed + 1)
    batch = own.batch(n)

    def run(model: nn.Module) -> Tensor:
        torch.manual_seed(seed)
        return own.losses(model, batch)

    return run, batch, own.losses


def base_names(model: nn.Module) -> list[str]:
    """The matrices under adapters, by the names that PEFT gives them."""
    return [name for name, p in model.named_parameters() if name.endswith("base_layer.weight")]


def reference(model: nn.Module, run: Run, chosen: Iterable[str], rho: float, group: int = 1) -> Exact:
    """Group after group: the gradient by the chosen parameters, the move, the gradient of what is trained there."""
    chosen = set(chosen)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters() if name in trained}
    other = deepcopy(model).double()
    params = dict(other.named_parameters())
    moving = [params[name].requires_grad_(True) for name in params if name in chosen]
    assert len(moving) == len(chosen)
    start, before = run(other).detach(), [p.detach().clone() for p in moving]
    size, norms, perturbed = len(start), [], torch.empty_like(start)
    for members in groups_of(size, group):
        grads = torch.autograd.grad(run(other)[members].sum(), moving, allow_unused=True)
        norm = torch.stack([g.square().sum() for g in grads if g is not None]).sum().sqrt()
        with torch.no_grad():
            for p, w, g in zip(moving, before, grads, strict=True):
                p.copy_(w if g is None else w + rho * g / norm)
        there = run(other)[members]
        found = torch.autograd.grad(there.sum() / size, [params[name] for name in trained], allow_unused=True)
        with torch.no_grad():
            for p, w in zip(moving, before, strict=True):
                p.copy_(w)
        for name, g in zip(trained, found, strict=True):
            if g is not None:
                total[name] += g
        norms.append(norm)
        perturbed[members] = there.detach()
    return Exact(start, torch.stack(norms), perturbed, total)


def trained_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Of what is trained, by name. Raises an AssertionError if something else has a gradient."""
    for name, p in model.named_parameters():
        assert p.requires_grad or p.grad is None, f"{name} is frozen and has a gradient"
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


class Adapter(nn.Module):
    """A layer with a low-rank adapter, with the names of PEFT, for tests that do without it."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base_layer: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer
        sizes: Any = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(sizes.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, sizes.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def _transformer(dropout: float) -> nn.Module:
    model = TinyTransformer(dropout)
    model.requires_grad_(False)
    for name in ("frozen", "feed", "back"):
        setattr(model, name, Adapter(getattr(model, name)))
    model.classifier.requires_grad_(True)  # trained as a whole, as by modules_to_save
    return model


#: The problems of ``helpers/problems.py`` with adapters; dropout, and none.
ADAPTED = Problem("adapted", lambda: _transformer(0.1), token_ids, False)
ADAPTED_NO_DROPOUT = Problem("adapted, no dropout", lambda: _transformer(0.0), token_ids, False)


class Small(nn.Module):
    """Tokens, a convolution, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.mix = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.words.weight
        self.score = nn.Linear(9, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.mix(self.words(ids).transpose(1, 2)).transpose(1, 2)
        return self.score(self.head(self.norm(h + self.down(self.up(h).tanh())).mean(1)))


#: Adapters that are not LoRA, with options for :func:`small`.
OTHER_KINDS: dict[str, dict[str, Any]] = {
    "LoHaConfig": {"r": 2},
    "LoKrConfig": {"r": 2},
    "IA3Config": {"feedforward_modules": ["down"]},
    "VeraConfig": {"r": 2},
    "OFTConfig": {"oft_block_size": 2, "r": 0},  # peft before 0.15 has another default
}


def small(targets: tuple[str, ...] = ("up", "down"), kind: str = "LoraConfig", **options: Any) -> nn.Module:
    """The small model with adapters of this kind."""
    import peft

    return peft.get_peft_model(Small(), getattr(peft, kind)(target_modules=list(targets), **options))
