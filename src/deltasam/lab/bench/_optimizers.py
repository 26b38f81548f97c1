"""The optimizers of the candidates: AdamW in three implementations, and one that does nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from deltasam.lab.bench.options import AdamW


@dataclass(frozen=True)
class Optimizer:
    """Creates optimizers, with a learning rate of zero, so that all candidates see the same weights."""

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]
    captured_options: dict[str, Any] = field(default_factory=dict)

    def over(self, model: torch.nn.Module, *, captured: bool = False) -> torch.optim.Optimizer:
        """Returns a new optimizer for the model's parameters; if ``captured``, one that works in a CUDA graph."""
        more = self.captured_options if captured else {}
        return self.kind(model.parameters(), **self.options, **more)


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
