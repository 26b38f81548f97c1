"""How the instances of a batch are divided into groups that share a perturbation."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Grouping:
    """N instances in groups of ``m`` neighbours; the last group may be smaller."""

    size: int
    m: int

    @property
    def groups(self) -> int:
        """G, the number of groups."""
        return -(-self.size // self.m)

    def rows(self, tensor: Tensor) -> Tensor:
        """``(N, S, ...)`` to ``(G, m S, ...)``; rows of zeros fill up the last group."""
        if self.m == 1:
            return tensor
        missing = self.groups * self.m - self.size
        if missing:
            tensor = F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing))
        return tensor.reshape(self.groups, -1, *tensor.shape[2:])

    def unrows(self, tensor: Tensor) -> Tensor:
        """Undoes :meth:`rows`."""
        if self.m == 1:
            return tensor
        return tensor.reshape(self.groups * self.m, -1, *tensor.shape[2:])[: self.size]

    def total(self, tensor: Tensor) -> Tensor:
        """Sums over the instances of each group: ``(N, ...)`` to ``(G, ...)``."""
        if self.m == 1:
            return tensor
        return self.rows(tensor.unsqueeze(1)).sum(1)

    def spread(self, tensor: Tensor) -> Tensor:
        """Repeats the value of each group for its instances: ``(G, ...)`` to ``(N, ...)``."""
        return tensor if self.m == 1 else tensor.repeat_interleave(self.m, 0)[: self.size]
