"""Averages of the weights over the updates of a training: EMA and SWA."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from deltasam._torch import uncompiled
from deltasam.parallel.shards import is_shard
from deltasam.step.checks import check_number

Kind = Literal["ema", "swa"]

_SWA_START = 0.75  # of the training, as in the SWA paper


@dataclass(kw_only=True)
class WeightAverage:
    r"""An average of the trained weights, to evaluate and keep instead of the last ones.

    .. math:: \text{ema:}\quad \bar w \leftarrow d_n \bar w + (1 - d_n)\, w, \quad
              d_n = \min\Bigl(d, \frac{1 + n}{10 + n}\Bigr) \qquad\qquad
              \text{swa:}\quad \bar w \leftarrow \bar w + \frac{w - \bar w}{n + 1}

    with n the number of updates averaged so far; the first one is copied. The small decay at the start (as in
    TensorFlow and timm) makes the average forget the weights before training, so that it needs no correction of bias.

    Only parameters with ``requires_grad`` are averaged: with LoRA the adapters. The methods of this package and any
    optimizer work unchanged, because the average only reads the weights. The arithmetic is torch's
    (``torch.optim.swa_utils``); its ``AveragedModel`` copies the whole model, frozen weights included, and waits for
    the device in every update.

    Buffers are not averaged. A model with BatchNorm needs new statistics for the averaged weights: call
    ``torch.optim.swa_utils.update_bn(loader, model)`` after :meth:`copy_to`.

    Cost: no pass; one copy of the trained parameters, in float32 at least; a second one inside :meth:`applied`.
    :meth:`update` reads and writes the copy once, and does not wait for the device.

    Attributes:
        kind: ``"ema"``: exponential moving average. ``"swa"``: equal weights for all updates from ``start`` on.
        decay: d, the decay of ``ema``: it averages about the last 1 / (1 - d) updates. A short fine-tuning needs a
            smaller one than pretraining: 0.99 for a few hundred updates.
        start: Share of the training before the first averaged update. None: 0 for ``ema``, 0.75 for ``swa``.
        every: Average only every so many updates.
        total_steps: Updates of the whole training, which ``start`` is a share of.

    References:
        Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, UAI 2018 (SWA).
        Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.

    Relations:
        :class:`~deltasam.integrations.WeightAverageCallback` does this in Hugging Face's trainers.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> average = WeightAverage(kind="swa", start=0.5, total_steps=4)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(3, 2)).sum().backward()
        ...     optimizer.step()
        ...     average.update(model)
        >>> last = model.bias.item()
        >>> with average.applied(model):
        ...     print(f"{model.bias.item() - last:.2f}")  # half a step of 0.3 before the last weights
        0.15
        >>> model.bias.item() == last
        True
    """

    kind: Kind = "ema"
    decay: float = 0.999
    start: float | None = None
    every: int = 1
    total_steps: int | None = None
    _steps: int = field(default=0, init=False, repr=False, compare=False)
    _count: int = field(default=0, init=False, repr=False, compare=False)
    _averages: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r} must be one of {list(get_args(Kind))}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay} must be in [0, 1)")
        if self.start is not None and not 0 <= self.start < 1:
            raise ValueError(f"start={self.start} must be in [0, 1), a share of the training")
        check_number("every", self.every, 1, whole=True)
        if self.total_steps is not None:
            check_number("total_steps", self.total_steps, 1, whole=True)

    @property
    def count(self) -> int:
        """Number of averaged updates; with 0 there is no average yet."""
        return self._count

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Takes the weights after an update into the average; call it after every ``optimizer.step()``.

        Raises:
            ValueError: ``start`` needs ``total_steps``; parameters are sharded; or other ones are trained than before.
        """
        skipped = self._skipped()
        self._steps += 1
        if self._steps <= skipped or (self._steps - skipped) % self.every:
            return
        trained = _trained(model)
        if not self._count:
            self._averages = {name: _precise(p).clone() for name, p in trained.items()}
        else:
            averages = self._matched(trained)
            current = [_precise(p) for p in trained.values()]
            if self.kind == "swa":
                get_swa_multi_avg_fn()(averages, current, self._count)  # type: ignore[no-untyped-call]
            else:
                decay = min(self.decay, (1 + self._count) / (10 + self._count))
                get_ema_multi_avg_fn(decay)(averages, current, self._count)  # type: ignore[no-untyped-call]
        self._count += 1

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Overwrites the trained weights with the average. Without an average they stay as they are."""
        if self._count:
            trained = _trained(model)
            for p, average in zip(trained.values(), self._matched(trained), strict=True):
                p.copy_(average)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Within the context the model has the averaged weights; afterwards its own again, bit for bit."""
        own = {name: p.detach().clone() for name, p in _trained(model).items()} if self._count else {}
        try:
            self.copy_to(model)
            yield
        finally:
            restore(model, own)

    def state_dict(self) -> dict[str, Any]:
        """The average, the number of calls and of averaged updates. The tensors are the average's own, not copies."""
        return {"kind": self.kind, "steps": self._steps, "count": self._count, "averages": dict(self._averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what :meth:`state_dict` returned.

        Raises:
            ValueError: It is the state of an average of the other kind.
        """
        if state["kind"] != self.kind:
            raise ValueError(f"kind={self.kind!r}, but the state is that of kind={state['kind']!r}: use that kind")
        self._steps, self._count = int(state["steps"]), int(state["count"])
        self._averages = {name: tensor.detach().clone() for name, tensor in state["averages"].items()}

    def _skipped(self) -> int:
        """Number of updates before the first that may be averaged."""
        start = (_SWA_START if self.kind == "swa" else 0.0) if self.start is None else self.start
        if start == 0:
            return 0
        if self.total_steps is None:
            raise ValueError(f"start={start} is a share of the training: set total_steps to its updates, or start=0")
        return math.floor(start * self.total_steps)

    def _matched(self, trained: Mapping[str, Tensor]) -> list[Tensor]:
        """The averages in the order of the parameters, on their devices."""
        other = trained.keys() ^ self._averages.keys()
        if other:
            raise ValueError(
                f"the parameter {min(other)!r} is trained now and was not averaged so far, or the reverse: make a new "
                "WeightAverage after freezing or adding parameters"
            )
        for name, p in trained.items():
            self._averages[name] = self._averages[name].to(p.device)
        return [self._averages[name] for name in trained]


@torch.no_grad()
def restore(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Writes weights by name into the trained parameters of the model."""
    trained = _trained(model) if weights else {}
    for name, value in weights.items():
        trained[name].copy_(value)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters by name, detached; they share the memory of the model."""
    return {name: p.detach() for name, p in _trained(model).items()}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    found = {name: p for name, p in _inner(model).named_parameters() if p.requires_grad}
    if not found:
        raise ValueError(f"{type(model).__name__} has no parameter with requires_grad: there is nothing to average")
    sharded = next((name for name, p in found.items() if is_shard(p)), None)
    if sharded is not None:
        raise ValueError(
            f"the parameter {sharded!r} is sharded (FSDP), which WeightAverage does not support: use DDP, or average "
            "the checkpoints after training"
        )
    return found


def _inner(model: nn.Module) -> nn.Module:
    """The module without torch.compile and data parallelism, which change the names of the parameters."""
    inner: nn.Module = uncompiled(model)
    if isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        inner = uncompiled(inner.module)
    return inner


def _precise(p: Tensor) -> Tensor:
    """In float32 at least: bfloat16 rounds away what a decay near 1 adds."""
    return p.detach().to(torch.promote_types(p.dtype, torch.float32))
