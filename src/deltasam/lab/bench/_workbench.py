"""What all candidates share: the model, the batch, the objective, and the optimizers to choose from."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.lab.bench._llama import LLAMAS, llama
from deltasam.lab.bench._lora import with_adapters
from deltasam.lab.bench.options import AdamW, StepOptions
from deltasam.objectives import CausalLM, Classification, Objective
from deltasam.speed.compiling import compiled
from deltasam.step.batches import MicroBatches, tree_map

# layers, hidden, heads, vocabulary
SHAPES: dict[str, tuple[int, int, int, int]] = {
    "mlp": (3, 256, 1, 1),
    "bert-tiny": (2, 32, 2, 128),
    "bert-2x128": (2, 128, 2, 30522),
    "bert-4x256": (4, 256, 4, 30522),
    "bert-2x768": (2, 768, 12, 30522),
    "bert-4x512": (4, 512, 8, 30522),
    "bert-8x512": (8, 512, 8, 30522),
    "bert-base": (12, 768, 12, 30522),
    "roberta-large": (24, 1024, 16, 50265),
    "bert-1b": (24, 1792, 28, 50265),
}
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
CLASSES = 3


@dataclass(frozen=True)
class Workbench:
    """A model and a batch on the device, and the precision to run them in."""

    model: nn.Module
    batch: Any
    size: int
    objective: Objective
    device: torch.device
    autocast: torch.dtype | None
    compile_mode: str = "default"
    adapters: str = ""  # the library that made them
    _compiled: list[nn.Module] = field(default_factory=list)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all parameters, trained or frozen, and buffers; tied ones count once."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return sum({each.data_ptr(): each.numel() * each.element_size() for each in tensors}.values())

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one copy of the trainable parameters."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

    def precision(self) -> AbstractContextManager[Any]:
        """Returns the context for forward passes."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def compiled(self) -> nn.Module:
        """Returns the compiled model, the same one for all candidates."""
        if not self._compiled:
            tuned = self.compile_mode == "tuned"
            model: Any = compiled(self.model) if tuned else torch.compile(self.model, mode=self.compile_mode)
            self._compiled.append(model)
        return self._compiled[0]

    def close(self) -> None:
        """Discards compiled code, which keeps its model alive and counts towards torch's limit of recompilations."""
        if self._compiled:
            self._compiled.clear()
            torch.compiler.reset()

    def micro_batches(self, number: int) -> MicroBatches:
        """Returns copies of the batch, as the micro-batches of one step."""
        return MicroBatches(tree_map(torch.clone, self.batch) for _ in range(number))

    def loss(self) -> Tensor:
        """Returns the mean loss, for third-party implementations."""
        return self.objective(self.model, self.batch).mean()

    def synchronize(self) -> None:
        """Waits until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def set_up(options: StepOptions) -> Workbench:
    """Creates the model and the batch, and sets threads, seed and the precision of matrix products."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no CUDA device; use --device cpu")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high" if options.precision == "tf32" else "highest")
    torch.manual_seed(options.seed)
    device = torch.device(name)
    adapters = ""
    with device:  # created on the device: 355M random weights take seconds on a CPU
        model, batch = _model_and_batch(options)
        if options.lora:
            model, adapters = with_adapters(model, rank=options.rank, dropout=options.dropout)
    if options.checkpointing:
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Workbench(
        model=model.to(device).train(),
        batch=tree_map(lambda tensor: tensor.to(device), batch),
        size=options.batch,
        objective=CausalLM() if options.model in LLAMAS else Classification(),
        device=device,
        autocast=PRECISIONS.get(options.precision),
        compile_mode=options.compile_mode,
        adapters=adapters,
    )


def _model_and_batch(options: StepOptions) -> tuple[nn.Module, Any]:
    if options.model in LLAMAS:
        return llama(options)
    return _mlp(options) if options.model == "mlp" else _transformer(options)


def _mlp(options: StepOptions) -> tuple[nn.Module, Any]:
    layers, hidden, _, _ = _shape(options)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(hidden, hidden), nn.GELU(), nn.Dropout(options.dropout)]
    return nn.Sequential(*parts, nn.Linear(hidden, CLASSES)), (torch.randn(options.batch, hidden), _labels(options))


def _transformer(options: StepOptions) -> tuple[nn.Module, Any]:
    from transformers import BertConfig, BertForSequenceClassification

    layers, hidden, heads, vocab = _shape(options)
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=max(512, options.length),
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
        num_labels=CLASSES,
    )
    tokens = torch.randint(vocab, (options.batch, options.length))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": _labels(options)}
    return BertForSequenceClassification(config), batch


def _labels(options: StepOptions) -> Tensor:
    return torch.randint(CLASSES, (options.batch,))


def _shape(options: StepOptions) -> tuple[int, int, int, int]:
    layers, hidden, heads, vocab = SHAPES[options.model]
    return options.layers or layers, options.hidden or hidden, options.heads or heads, options.vocab or vocab


# -- optimizers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimizer:
    """Creates optimizers, with a learning rate of zero, so that all candidates see the same weights."""

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]
    captured_options: dict[str, Any] = field(default_factory=dict)

    def over(self, model: torch.nn.Module, *, captured: bool = False) -> torch.optim.Optimizer:
        """Returns a new optimizer for what is trained; if ``captured``, one that works in a CUDA graph."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return self.kind(trained, **self.options, **(self.captured_options if captured else {}))


class NoStep(torch.optim.Optimizer):
    """Takes no step and has no state, so that only the method is measured."""

    def __init__(self, params: Any, **_: Any) -> None:
        super().__init__(params, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing."""


def adamw(implementation: AdamW) -> Optimizer:
    """Returns AdamW in one of torch's implementations. ``fused`` is the default of Hugging Face's Trainer."""
    chosen = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    return Optimizer(torch.optim.AdamW, {"lr": 0.0, **chosen}, {"capturable": True})


NO_OPTIMIZER = Optimizer(NoStep, {})
