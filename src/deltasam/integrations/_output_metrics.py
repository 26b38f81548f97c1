"""What TRL logs about the outputs of the model, from the pass at w of every step, without another forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ENTRIES = 2**24  # logits in one chunk: 64 MB in float32

Measure = Callable[..., "dict[str, tuple[Tensor, Tensor]] | None"]
"""``measure(objective, outputs, **values)``: a sum and a count by name; None for an unknown objective."""


class OutputMetrics:
    """Means over steps, each a sum over a count. Adding a step does not synchronize; reading the means does so once.

    The values of a step are written to fixed memory, so that a CUDA graph that was recorded with them writes them in
    every replay.
    """

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._names: list[str] = []
        self._latest: Tensor | None = None  # (names, 2)
        self._means: Tensor | None = None
        self._steps = 0

    @torch.no_grad()
    def observe(self, objective: Any, outputs: Tensor, *, first: bool, **values: Any) -> None:
        """Called with the outputs of every micro-batch of a step, see ``observed_outputs``."""
        found = self._measure(objective, outputs, **values)
        if found is None:
            return
        latest = torch.stack([torch.stack([part.float() for part in pair]) for pair in found.values()])
        self._names = list(found)
        if self._latest is None or self._latest.device != latest.device:
            self._latest = torch.zeros_like(latest)
        if first:
            self._latest.copy_(latest)
        else:
            self._latest.add_(latest)

    def add(self) -> None:
        """Adds the values of the step that has ended."""
        if self._latest is None:
            return
        total, count = self._latest.unbind(1)
        mean = torch.where(count > 0, total / count.clamp(min=1), 0.0)  # TRL logs 0 for a batch without targets
        self._means = mean if self._means is None else self._means + mean
        self._steps += 1

    def drain(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Returns the means since the last call; ``reduce`` averages a tensor over the processes."""
        if self._means is None:
            return {}
        values = reduce(self._means / self._steps).tolist()
        self._means, self._steps = None, 0
        return dict(zip(self._names, values, strict=True))


def token_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, whether the label has the largest logit, and mean logit, (R,), from logits (R, V) and labels (R,).

    In chunks, because a copy of the logits in float32 can be the largest tensor of a step.
    """
    rows = max(1, _ENTRIES // logits.shape[-1])
    parts = []
    for chunk, label in zip(logits.split(rows), labels.split(rows), strict=True):
        wide = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
        log_probs = wide.log_softmax(-1)
        parts.append((-(log_probs.exp() * log_probs).sum(-1), wide.argmax(-1) == label, wide.mean(-1)))
    entropy, top, mean = (torch.cat(part) for part in zip(*parts, strict=True))
    return entropy, top, mean
