"""Sections of the configuration that do not depend on the task or the method."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from deltasam.step.averaging import Kind, WeightAverage
from deltasam.step.checks import check_number


@dataclass(frozen=True, kw_only=True)
class Lora:
    """LoRA adapters: the model is frozen, and ``alpha / r`` times a product of two matrices is added to each layer.

    Attributes:
        r: Rank of the product.
        alpha: Scale of the product, divided by the rank. None for twice the rank.
        targets: Names of the layers that get adapters. ``all-linear``: all except the output layer.
        dropout: Dropout of the adapters' inputs.
    """

    r: int = 16
    alpha: float | None = None
    targets: tuple[str, ...] = ("all-linear",)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_number("r", self.r, 1, whole=True)
        if self.alpha is not None:
            check_number("alpha", self.alpha, 0, open_low=True)
        if not self.targets:
            raise ValueError("targets=[] must name at least one layer, or all-linear")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to fine-tune.

    Attributes:
        path: A folder, a GGUF file, a name on the hub, or a packaged model (``minilm-l6``, ``mpnet-base``,
            ``smollm2-135m``).
        dropout: Dropout of hidden states and attention; None for the value in the model's configuration.
        lora: Train LoRA adapters instead of the whole model: true, the rank, or options such as ``{r: 8, alpha: 16}``.
    """

    path: str
    dropout: float | None = None
    lora: Lora | None = field(default=None, metadata={"later": (None,)})

    def __post_init__(self) -> None:
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class Average:
    """An average of the trained weights, which is evaluated and kept; see :class:`~deltasam.WeightAverage`.

    Attributes:
        kind: ``ema``: exponential moving average; ``swa``: equal weights for all updates from ``start`` on.
        decay: Decay of ``ema``.
        start: Share of the training before the first averaged update; None for 0 (``ema``) or 0.75 (``swa``).
        every: Average only every so many updates.
    """

    kind: Kind
    decay: float = 0.999
    start: float | None = None
    every: int = 1

    def __post_init__(self) -> None:
        self.made()

    @property
    def name(self) -> str:
        """The name in run folders and tables: ``EMA`` or ``SWA``."""
        return self.kind.upper()

    def made(self) -> WeightAverage:
        """Returns a new average without state."""
        return WeightAverage(kind=self.kind, decay=self.decay, start=self.start, every=self.every)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW. The defaults are R-Drop's for GLUE.

    Attributes:
        lr: Peak learning rate. The commands and :func:`~deltasam.lab.experiments.resolve` choose it by the size of the
            model if it is not set.
        betas: Decay of the two moments.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled weight decay.
        decay_all: Also decay biases and normalisation layers (Mirror-BERT, fairseq).
        max_grad_norm: Clip the gradient to this norm; 0 for no clipping.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.01
    decay_all: bool = False
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "max_grad_norm", "eps"):
            check_number(name, getattr(self, name), 0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={list(self.betas)} must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Length of the training and learning rate: linear warm-up from 0, then ``kind``.

    Attributes:
        kind: ``polynomial`` decays linearly to ``lr_end``, ``linear`` to 0, ``cosine`` to 0, ``constant`` stays.
        steps: Number of updates; takes precedence over ``epochs``.
        epochs: Number of passes over the training data.
        warmup_steps: Number of warm-up updates; None to use ``warmup``.
        warmup: Fraction of all updates used for warm-up.
        lr_end: Final learning rate of ``polynomial``.
    """

    kind: Literal["polynomial", "linear", "cosine", "constant"] = "polynomial"
    steps: int | None = None
    epochs: float = 3.0
    warmup_steps: int | None = None
    warmup: float = 0.06
    lr_end: float = 1e-7

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_number("steps", self.steps, 1, whole=True)
        check_number("epochs", self.epochs, 0, open_low=True)
        if not 0 <= self.warmup <= 1:
            raise ValueError(
                f"warmup={self.warmup} must be a fraction in [0, 1]; for a number of updates use warmup_steps"
            )
        if self.warmup_steps is not None:
            check_number("warmup_steps", self.warmup_steps, 0, whole=True)

    def total(self, updates_per_epoch: int) -> int:
        """Returns the total number of updates."""
        return self.steps if self.steps is not None else max(1, math.ceil(self.epochs * updates_per_epoch))

    def warmup_of(self, total: int) -> int:
        """Returns the number of warm-up updates out of ``total``."""
        return self.warmup_steps if self.warmup_steps is not None else min(math.ceil(self.warmup * total), total - 1)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Instances per update.

    Attributes:
        size: Instances per step of the method.
        accumulation: Steps per update.
        eval_size: Instances per batch of the evaluation; affects time and memory only.
        drop_last: Drop the last batch of an epoch if it is smaller.
    """

    size: int = 32
    accumulation: int = 1
    eval_size: int = 64
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name in ("size", "accumulation", "eval_size"):
            check_number(name, getattr(self, name), 1, whole=True)

    def updates_per_epoch(self, rows: int) -> int:
        """Returns the number of updates in one pass over this many rows."""
        batches = rows // self.size if self.drop_last else math.ceil(rows / self.size)
        return max(1, math.ceil(batches / self.accumulation))
