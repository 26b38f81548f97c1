"""Small models with everything that has broken implementations of SAM, and their batches and objectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltasam.objectives import Objective


class TinyTransformer(nn.Module):
    """Dropout, LayerNorm, a tied and twice-used embedding, an unused head, a frozen part, an odd shape."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(11, 6, padding_idx=0)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.attention = nn.MultiheadAttention(6, 2, dropout=dropout, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.feed = nn.Linear(6, 9)
        self.back = nn.Linear(9, 6)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embeddings.weight
        self.classifier = nn.Linear(11, 3)
        self.unused_head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embeddings(ids)
        h = h + 0.1 * self.frozen(h)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        h = h + self.dropout(self.back(F.gelu(self.feed(h))))
        return self.classifier(self.head(h.mean(1)))


class TinyCNN(nn.Module):
    """BatchNorm: statistics that a pass changes, and instances that depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.dropout(F.relu(self.bn(self.conv(images))).mean((2, 3))))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


@dataclass(frozen=True)
class Outputs(Objective):
    """Makes the table's callables objectives, whose divergence compares the losses."""

    function: Callable[[nn.Module, Any], Tensor]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return self.function(model, batch)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        return (first - second).square()


@dataclass(frozen=True)
class Problem:
    """A model, a batch and an objective, made afresh by :meth:`make`."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    floating_inputs: bool

    def __str__(self) -> str:
        return self.name  # in the names of tests, which must be the same in all processes

    def make(self, dtype: torch.dtype = torch.float64, size: int = 5) -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(1)
        model = self.build().to(dtype).train()
        inputs = self.inputs(size)
        batch = (inputs.to(dtype) if self.floating_inputs else inputs, torch.randint(3, (size,)))
        return model, batch, cross_entropy


def token_ids(n: int) -> Tensor:
    return torch.randint(1, 11, (n, 7))


TRANSFORMER = Problem("transformer", TinyTransformer, token_ids, False)
TRANSFORMER_NO_DROPOUT = Problem("no-dropout", lambda: TinyTransformer(0.0), token_ids, False)
CNN = Problem("cnn", TinyCNN, lambda n: torch.randn(n, 2, 5, 5), True)


def grads(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients by name."""
    return {n: p.grad.to_dense().clone() for n, p in model.named_parameters() if p.grad is not None}


def relative_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Norm of the difference relative to the expected norm, over all parameters; a missing one is zero."""
    names = found.keys() | wanted.keys()
    a = torch.cat([(found[n] if n in found else torch.zeros_like(wanted[n])).flatten() for n in sorted(names)])
    b = torch.cat([(wanted[n] if n in wanted else torch.zeros_like(found[n])).flatten() for n in sorted(names)])
    return float((a - b).norm() / b.norm())
