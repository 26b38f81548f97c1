"""What to measure. Imports nothing but the standard library: the command line reads it for its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Way = Literal["eager", "compiled", "captured", "compiled+captured"]
Shape = Literal[
    "mlp",
    "bert-tiny",
    "bert-2x128",
    "bert-4x256",
    "bert-2x768",
    "bert-4x512",
    "bert-8x512",
    "bert-base",
    "roberta-large",
]
TrainWay = Literal["eager", "captured"]
AdamW = Literal["fused", "foreach", "for-loop"]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Measures a training step of every method: time, passes counted by hooks, extra memory.

    Args:
        model: Shape of the model; its weights are random, so nothing is downloaded.
        layers: Number of layers, instead of the shape's.
        hidden: Width, instead of the shape's.
        heads: Attention heads, instead of the shape's.
        vocab: Size of the vocabulary, instead of the shape's.
        batch: Instances in a batch (N).
        length: Tokens in an instance (T).
        dropout: Dropout probability.
        device: Where to run; auto takes a GPU if there is one.
        precision: tf32 changes the matrix products, bf16 and fp16 run under autocast.
        methods: Methods and regularisers to measure beside ERM and SAM, e.g. delta-sam; all by default.
        ways: How to run every method: eager, with a compiled model, captured as CUDA graphs, or compiled+captured.
        compile_mode: The mode of torch.compile; tuned: with the settings of deltasam.speed.compiling.compiled;
            max-autotune-no-cudagraphs: tries out kernels for the products, too (slow).
        third_party: Measure the implementations of other packages, too, where they are installed; --no-third-party does not.
        adamw: Implementations of AdamW; the first one is behind everything, ERM and SAM run with the others, too.
        rounds: Timed rounds; in each, every candidate takes its turn.
        seconds: Steps in a row that last this long in all rounds together; by default 5 on a GPU, 1 on a CPU a round.
        warmup: Rounds before the clock starts.
        clock: Time on the wall, or of the processor, which a busy machine disturbs less.
        memory: Measure peak memory; --no-memory does not.
        isolate: Measure only norm + perturb + restore of SAM, against other packages.
        threads: Threads of torch on the CPU; torch's own choice by default.
        seed: Seed of the weights and the batch.
        json: Write the results to this file.
        plot: Draw the ratios into this file (png, pdf or svg; needs matplotlib).
    """

    model: Shape = "bert-4x256"
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocab: int | None = None
    batch: int = 16
    length: int = 64
    dropout: float = 0.1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    methods: tuple[str, ...] = ()
    ways: tuple[Way, ...] = ("eager",)
    compile_mode: Literal["default", "tuned", "max-autotune-no-cudagraphs"] = "default"
    third_party: bool = True
    adamw: tuple[AdamW, ...] = ("fused",)
    rounds: int = 7
    seconds: float | None = None
    warmup: int = 2
    clock: Literal["wall", "cpu"] = "wall"
    memory: bool = True
    isolate: bool = False
    threads: int | None = None
    seed: int = 0
    json: Path | None = None
    plot: Path | None = None

    @property
    def shape(self) -> str:
        """The model as it is built: the name of the shape, with the sizes that were given instead of its own."""
        sizes = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "vocab")}
        told = ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)
        return f"{self.model} ({told})" if told else self.model

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            ValueError: A size is not positive, dropout is not a probability, or no AdamW is named.
        """
        for name in ("layers", "hidden", "heads", "vocab", "batch", "length", "rounds", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup} must be at least 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be a probability below 1")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds} must be more than 0")
        if not self.adamw:
            raise ValueError("adamw=() names none; choose from fused, foreach, for-loop")
