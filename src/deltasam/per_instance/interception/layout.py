"""Where the instances are in a tensor that a layer is called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor

from deltasam.per_instance.interception.tensors import (
    CallKey,
    Kind,
    LayoutTable,
    PerInstance,
    instances_back,
    instances_first,
)


class Layout(NamedTuple):
    """How a tensor of shape ``(*lead, *features)`` is divided among the instances.

    ``batch``: instances in front; ``flat``: instances and positions in one dimension; ``tiled``: the batch several
    times over (two views in one pass); ``shared``: the same for all instances (position ids of shape (1, T),
    bias tables); ``hidden``: a :class:`PerInstance`. ``key``: where it is noted if the shape allowed another kind.
    """

    kind: Kind
    size: int
    reading: LayoutTable
    lead: tuple[int, ...]
    key: CallKey | None = None

    @property
    def is_erm(self) -> bool:
        """Whether the tensor is ``(N, S, *features)`` as it stands."""
        return self.kind == "batch" and len(self.lead) == 2

    def split(self, tensor: Tensor, features: int) -> Tensor:
        """``(N, S, *features)``, a view where possible. What is shared is expanded."""
        if self.kind == "batch" and tensor.ndim == 2 + features:
            return tensor
        if isinstance(tensor, PerInstance):
            tensor = tensor.inner
        elif self.kind == "shared":
            tensor = tensor.unsqueeze(0).expand(self.size, *tensor.shape)
        elif self.kind == "tiled":
            tensor = instances_first(tensor, self.size, "tiled")
        return tensor.reshape(self.size, -1, *tensor.shape[tensor.ndim - features :])

    def join(self, tensor: Tensor) -> Tensor:
        """``(N, S, *features)`` back to what the model expects."""
        if self.kind == "batch" and tensor.shape[:2] == self.lead:
            return tensor
        tail = tensor.shape[2:]
        if self.kind in ("shared", "hidden"):
            return PerInstance.wrap(tensor.reshape(self.size, *self.lead, *tail), self.reading)
        if self.kind == "tiled":
            times = self.lead[0] // self.size
            return instances_back(tensor.reshape(self.size, times, -1, *tail), "tiled").reshape(*self.lead, *tail)
        return tensor.reshape(*self.lead, *tail)


def find_layout(tensor: Tensor, features: int, size: int, reading: LayoutTable, name: str) -> Layout:
    """The layout of an input of a parameter's layer by its shape; what was found out settles what that leaves open.

    Where it is open, the reading that keeps the model's own shapes comes first; it is verified afterwards.
    """
    lead = tuple(tensor.shape[: tensor.ndim - features])
    if isinstance(tensor, PerInstance):
        return Layout("hidden", size, reading, lead)
    if not lead or lead[0] % size:
        return Layout("shared", size, reading, lead)
    key = (name, tensor.ndim, lead[0] == size)
    kind = reading.kinds.get(key) or ("batch" if lead[0] == size else cast("Kind", reading.order))
    return Layout(kind, size, reading, lead, key)


@dataclass(frozen=True)
class Grouping:
    """``m`` instances share one perturbation; the last group may be smaller."""

    size: int
    m: int

    @property
    def groups(self) -> int:
        return -(-self.size // self.m)

    def rows(self, tensor: Tensor) -> Tensor:
        """``(N, S, ...)`` to ``(G, m S, ...)``; rows of zeros fill the last group."""
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
        """One value per group to one per instance: ``(G, ...)`` to ``(N, ...)``."""
        return tensor if self.m == 1 else tensor.repeat_interleave(self.m, 0)[: self.size]
