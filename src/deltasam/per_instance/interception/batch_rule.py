"""Where the instances are in a tensor: the rule, and the two exceptions to it that a model may need.

**The rule.** A tensor belongs to the batch if its leading dimension is N, or k N. In the second case the k rows of an
instance are adjacent: GPT-2 flattens ``(N, T, H)`` to ``(N T, H)``, multiple choice puts the options side by side. A
tensor with any other leading dimension is *shared*: it is the same for all instances.

The gradients of two groups are compared with autograd's on first use. A failed comparison allows two exceptions:

- *shared* although it has k N rows: T5's positions ``(T, T)`` if N divides T, the unit matrix of DoRA. This applies
  only to the inputs of the parameter whose gradient is wrong.
- *tiled*: R-Drop concatenates the batch with itself, so instance i is in the rows i and N + i.

If neither makes the gradients right, the engine falls back to the loop. Nothing else is tried. Where a model
chooses rows by their content (``h[mask]``), the rule is tested in every step, see ``verification/own_rows.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

#: ``batch``: the rows of an instance are adjacent; ``tiled``: they are N rows apart; ``shared``: the same for all
#: instances; ``hidden``: a ``PerInstance``, which carries the instances in a dimension that the model does not see.
Kind = Literal["batch", "tiled", "shared", "hidden"]


class Place(NamedTuple):
    """Where a tensor of k N rows was used, so that the rule could be wrong about it."""

    name: str  # of the parameter, or of the operation with ()
    ndim: int
    exact: bool  # k = 1


@dataclass
class LayoutTable:
    """How the tensors of one model are read.

    ``seen`` counts the places of the current pass by how they were read. A comparison with autograd is valid for these
    only: a table that has k N rows only for some lengths is a new place, and compared again.
    """

    tiled: bool = False  # tensors of k N rows, k > 1, hold the batch k times
    shared: set[Place] = field(default_factory=set)  # places whose input is shared although it has k N rows
    seen: dict[tuple[Place, Kind], int] = field(default_factory=dict)

    def kind(self, place: Place) -> Kind:
        """How an input of k N rows is read."""
        if place in self.shared:
            return "shared"
        return "tiled" if self.tiled and not place.exact else "batch"

    def note(self, place: Place, kind: Kind) -> None:
        """Counts one tensor that was read in this way."""
        what = (place, kind)
        self.seen[what] = self.seen.get(what, 0) + 1

    def not_shared(self, names: Iterable[str]) -> set[Place]:
        """The places of these parameters that the current pass did not read as shared."""
        wanted = set(names)
        return {place for place, kind in self.seen if place.name in wanted and kind != "shared"}

    def operations(self) -> list[str]:
        """The operations without a rule that treated a tensor as the batch in the current pass."""
        return sorted({place.name for place, _ in self.seen if place.name.endswith("()")})

    def may_be_tiled(self) -> bool:
        """Whether the current pass read several rows per instance as adjacent."""
        return any(kind == "batch" and not place.exact for place, kind in self.seen)

    def instances_first(self, tensor: Tensor, size: int) -> Tensor:
        """A batch of k N rows as ``(N, k, ...)``."""
        if not self.tiled or tensor.shape[0] == size:
            return tensor.reshape(size, -1, *tensor.shape[1:])
        return tensor.reshape(-1, size, *tensor.shape[1:]).transpose(0, 1)

    def instances_back(self, tensor: Tensor) -> Tensor:
        """Undoes :meth:`instances_first`."""
        return (tensor.transpose(0, 1) if self.tiled and tensor.shape[1] > 1 else tensor).flatten(0, 1)
