"""Models that draw random numbers for every row of a batch, so that a row has other draws in another batch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deltasam.objectives import Classification

SOURCES = ("dropout", "python", "numpy", "generator")


class Noisy(nn.Module):
    """An LSTM whose outputs are multiplied with noise from one of the random streams in training."""

    def __init__(self, source: str = "dropout") -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.5)
        self.noise = torch.Generator().manual_seed(0)
        self.source = source
        self.rows: list[int] = []  # of every call

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[0])
        h = self.lstm(x)[0].mean(1)
        if not self.training:
            return self.head(h)
        return self.head(5 * (self.dropout(h) if self.source == "dropout" else h * self._factors(h).to(h)))

    def _factors(self, h: Tensor) -> Tensor:
        if self.source == "python":
            return torch.tensor([[random.random() for _ in row] for row in h])
        if self.source == "numpy":
            return torch.from_numpy(np.random.rand(*h.shape))  # noqa: NPY002 - what a model may draw from
        return torch.rand(h.shape, generator=self.noise)


def noisy(source: str = "dropout") -> tuple[Noisy, Any]:
    """A model in training and a batch of 6, always the same; the random streams are at the same place, too."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    model, batch = Noisy(source).double().train(), (torch.randn(6, 5, 4).double(), torch.arange(6) % 3)
    return model, batch


def cross_entropies(model: nn.Module, batch: Any) -> Tensor:
    """The losses of ``Classification()`` as a function, of which nothing is known: its batches are never cut."""
    return Classification()(model, batch)
