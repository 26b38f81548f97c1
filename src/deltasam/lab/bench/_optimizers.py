"""The optimizers behind the candidates: AdamW in its three implementations, and one that does nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from deltasam.lab.bench.options import AdamW


@dataclass(frozen=True)
class Optimizer:
    """Makes optimizers. A learning rate of zero lets all candidates see the same weights."""

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]
    captured_options: dict[str, Any] = field(default_factory=dict)

    def over(self, model: torch.nn.Module, *, captured: bool = False) -> torch.optim.Optimizer:
        """A fresh optimizer over the model's parameters; ``captured``: one that can be part of a CUDA graph."""
        more = self.captured_options if captured else {}
        return self.kind(model.parameters(), **self.options, **more)


class NoStep(torch.optim.Optimizer):
    """Takes no step and keeps no state: what is measured with it is the method's own."""

    def __init__(self, params: Any, **_: Any) -> None:
        super().__init__(params, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing."""


def adamw(implementation: AdamW) -> Optimizer:
    """AdamW in one of torch's implementations; the fused one is what Hugging Face's Trainer takes by default."""
    chosen = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    return Optimizer(torch.optim.AdamW, {"lr": 0.0, **chosen}, {"capturable": True})


NO_OPTIMIZER = Optimizer(NoStep, {})
