"""Options of the benchmarks. Imports only the standard library, so that the help text appears quickly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Way = Literal["eager", "compiled", "captured", "compiled+captured"]
Shape = Literal[
    "mlp", "bert-tiny", "bert-2x128", "bert-4x256", "bert-2x768", "bert-4x512", "bert-8x512", "bert-base",
    "roberta-large",
]  # fmt: skip
TrainWay = Literal["eager", "captured"]
AdamW = Literal["fused", "foreach", "for-loop"]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Measures a training step of every method: time, forward and backward passes, peak memory.

    Args:
        model: Shape of the model. Its weights are random, so nothing is downloaded.
        layers: Number of layers. Overrides the shape's.
        hidden: Hidden size. Overrides the shape's.
        heads: Number of attention heads. Overrides the shape's.
        vocab: Size of the vocabulary. Overrides the shape's.
        batch: Instances per batch (N).
        length: Tokens per instance (T).
        dropout: Dropout probability.
        device: The device; auto uses a GPU if there is one.
        precision: Precision of the model; tf32 affects matrix products, bf16 and fp16 use autocast.
        methods: Methods and regularisers to measure in addition to ERM and SAM, such as delta-sam. Defaults to all.
        ways: How to run each method: eager, with a compiled model, captured as CUDA graphs, or compiled+captured.
        compile_mode: Mode of torch.compile. tuned: the settings of deltasam.speed.compiling.compiled;
            max-autotune-no-cudagraphs: also tunes the kernels of matrix products (slow).
        third_party: Measure installed third-party implementations, unless --no-third-party is given.
        adamw: Implementations of AdamW. All candidates use the first one; ERM and SAM run with the others, too.
        rounds: Number of timed rounds. In each, every candidate takes its turn.
        seconds: Total time per candidate, which sets its steps per round. Defaults to 5 steps on a GPU, 1 on a CPU.
        warmup: Number of rounds without timing.
        clock: wall time, or cpu time of the process, which is more robust on a busy machine.
        memory: Measure peak memory, unless --no-memory is given.
        isolate: Measure only norm + perturb + restore of SAM, compared with third-party implementations.
        threads: Number of CPU threads of torch. Defaults to torch's choice.
        seed: Seed of the weights and the batch.
        json: File to write the results to.
        plot: File for a plot of the results (png, pdf or svg; needs matplotlib).
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
        """The name of the shape, with the sizes that override it."""
        sizes = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "vocab")}
        given = ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)
        return f"{self.model} ({given})" if given else self.model

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A size is not positive, dropout is not a probability, or adamw is empty.
        """
        for name in ("layers", "hidden", "heads", "vocab", "batch", "length", "rounds", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup} must be at least 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be in [0, 1)")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds} must be more than 0")
        if not self.adamw:
            raise ValueError("adamw=() must not be empty; choose from fused, foreach, for-loop")
