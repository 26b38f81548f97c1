"""Brings the input of a layer from the layout of the model to ``(N, S, *features)``, and the output back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deltasam.per_instance.interception.batch_rule import Kind, LayoutTable, Place
from deltasam.per_instance.interception.tensors import PerInstance


class Layout(NamedTuple):
    """How a tensor of shape ``(*lead, *features)`` is divided among the instances."""

    kind: Kind
    size: int  # N
    table: LayoutTable
    lead: tuple[int, ...]
    place: Place | None = None  # set if the tensor has k N rows, so that the rule could be wrong
    is_split: bool = False  # whether the tensor already is (N, S, *features)

    def split(self, tensor: Tensor, features: int) -> Tensor:
        """``(N, S, *features)``, a view where possible. A shared tensor is expanded."""
        if self.kind == "batch" and self.lead[0] == self.size and tensor.ndim == 2 + features:
            return tensor
        if isinstance(tensor, PerInstance):
            tensor = tensor.inner
        elif self.kind == "shared":
            tensor = tensor.unsqueeze(0).expand(self.size, *tensor.shape)
        elif self.kind == "tiled":
            tensor = self.table.instances_first(tensor, self.size)
        return tensor.reshape(self.size, -1, *tensor.shape[tensor.ndim - features :])

    def join(self, tensor: Tensor) -> Tensor:
        """``(N, S, *features)`` back to the layout of the model."""
        if self.kind == "batch" and tensor.shape[:2] == self.lead:
            return tensor
        tail = tensor.shape[2:]
        if self.kind in ("shared", "hidden"):
            return PerInstance.wrap(tensor.reshape(self.size, *self.lead, *tail), self.table)
        if self.kind == "tiled":
            times = self.lead[0] // self.size
            tensor = self.table.instances_back(tensor.reshape(self.size, times, -1, *tail))
        return tensor.reshape(*self.lead, *tail)


def find_layout(tensor: Tensor, features: int, size: int, table: LayoutTable, name: str) -> Layout:
    """The layout of an input of the layer of parameter ``name``: the rule, and the exceptions in the table."""
    lead = tuple(tensor.shape[: tensor.ndim - features])
    if isinstance(tensor, PerInstance):
        return Layout("hidden", size, table, lead)
    if not lead or lead[0] % size:
        return Layout("shared", size, table, lead)
    place = Place(name, tensor.ndim, lead[0] == size)
    kind = table.kind(place)
    return Layout(kind, size, table, lead, place, is_split=kind == "batch" and place.exact and len(lead) == 2)
