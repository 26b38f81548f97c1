"""Options of the benchmarks. Imports only the standard library, so that the help text appears quickly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar

Way = Literal["eager", "compiled", "captured", "compiled+captured"]
Shape = Literal[
    "mlp", "bert-tiny", "bert-2x128", "bert-4x256", "bert-2x768", "bert-4x512", "bert-8x512", "bert-base",
    "roberta-large", "bert-1b", "llama-tiny", "llama-135m", "llama-1.1b", "llama-7b",
]  # fmt: skip
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
TrainWay = Literal["eager", "captured"]
AdamW = Literal["fused", "foreach", "for-loop"]

T = TypeVar("T")
if TYPE_CHECKING:
    Filled = Annotated[T, "not None: __post_init__ replaces it"]
else:
    Filled = Optional[T]  # noqa: UP045  # the command line sees that the option may be missing
MISSING: Any = None

# Defaults of the options that depend on --lora.
USUAL: dict[str, Any] = {"model": "bert-4x256", "batch": 16, "length": 64, "dropout": 0.1, "precision": "fp32"}
WITH_LORA: dict[str, Any] = {"model": "llama-1.1b", "batch": 8, "length": 512, "dropout": 0.0, "precision": "bf16"}


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Measures a training step of every method: time, forward and backward passes, peak memory.

    Args:
        model: Shape of the model. Its weights are random, so nothing is downloaded. Defaults to bert-4x256, with
            --lora to llama-1.1b.
        layers: Number of layers. Overrides the shape's.
        hidden: Hidden size. Overrides the shape's.
        heads: Number of attention heads. Overrides the shape's.
        vocab: Size of the vocabulary. Overrides the shape's.
        batch: Instances per batch (N). Defaults to 16, with --lora to 8.
        length: Tokens per instance (T). Defaults to 64, with --lora to 512.
        dropout: Dropout probability. Defaults to 0.1, with --lora to 0 (that of the adapters).
        lora: Measure LoRA on the shape of a language model: time and memory of each method, relative to plain LoRA.
        rank: Rank of the adapters. All linear layers except the head have one.
        checkpointing: Recompute the activations in the backward pass (gradient checkpointing). Only with --lora.
        device: The device; auto uses a GPU if there is one.
        precision: Precision of the model; tf32 affects matrix products, bf16 and fp16 use autocast. With --lora, bf16
            and fp16 are also the type of the frozen weights; the adapters are float32, as PEFT makes them. Defaults
            to fp32, with --lora to bf16.
        accumulate: Measure each method also over this many batches in one step (MicroBatches). Not with --lora.
        methods: Methods and regularisers to measure in addition to ERM and SAM, by name or with options, such as
            delta-sam or per-instance-sam:params=base,rho=0.01. Defaults to all, with --lora to those for adapters.
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

    model: Filled[Shape] = MISSING
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocab: int | None = None
    batch: Filled[int] = MISSING
    length: Filled[int] = MISSING
    dropout: Filled[float] = MISSING
    lora: bool = False
    rank: int = 16
    checkpointing: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Filled[Precision] = MISSING
    accumulate: int = 1
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
        """Fills in the defaults and checks the values.

        Raises:
            ValueError: A size is not positive, dropout is not a probability, adamw is empty, or an option does not
                go with ``lora``.
        """
        for name, default in (WITH_LORA if self.lora else USUAL).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        self._check_lora()
        for name in (
            "layers",
            "hidden",
            "heads",
            "vocab",
            "batch",
            "length",
            "rank",
            "rounds",
            "threads",
            "accumulate",
        ):
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

    def _check_lora(self) -> None:
        if not self.lora:
            if self.checkpointing:
                raise ValueError("checkpointing=True needs lora=True: --lora --checkpointing")
            return
        if not self.model.startswith("llama-"):
            raise ValueError(f"model={self.model} has no adapters here; with lora choose a shape such as llama-135m")
        if self.isolate:
            raise ValueError("isolate=True measures the perturbation of all weights; it does not go with lora=True")
        if self.accumulate > 1:
            raise ValueError(f"accumulate={self.accumulate} is not measured with lora; leave it out")
        compiled = [way for way in self.ways if "compiled" in way]
        if compiled:
            raise ValueError(f"ways={compiled[0]} is not measured with lora; choose from eager, captured")
        if not self.ways:
            raise ValueError("ways=() must not be empty; choose from eager, captured")
