"""The derivatives of the loss by the outputs of the model, kept from one pass of a step for another.

The gradient of a loss l(f(w)) is the product of the Jacobian of the outputs f and of the derivative of l by f, the
cotangent. With cotangents from another pass, the two factors belong to different weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltasam.step.batches import tree_map

_Key = tuple[int, int]  # of a tensor: the number of its micro-batch, and its place in the outputs


class Cotangents:
    """The derivatives of a step's loss by the outputs of the model, of all micro-batches. They carry the loss scale.

    Outputs are tensors, alone or in mappings, lists and tuples; a mapping comes back as a plain dict.

    Cost: the memory of the outputs, until the pass that uses the cotangents.

    Example:
        >>> w, kept = torch.tensor(3.0, requires_grad=True), Cotangents()
        >>> kept.record(0, 2 * w).square().backward()  # the derivative of f^2 at f = 6 is 12
        >>> w.grad = None
        >>> kept.replace(0, 5 * w).sin().backward()  # that of the sine is not used
        >>> w.grad
        tensor(60.)
    """

    def __init__(self) -> None:
        self._kept: dict[_Key, Tensor] = {}

    def record(self, k: int, outputs: Any) -> Any:
        """Returns the outputs of micro-batch k. A backward through what is returned keeps its derivatives."""
        return self._hooked(k, outputs, self._kept.__setitem__)

    def replace(self, k: int, outputs: Any) -> Any:
        """Returns the outputs of micro-batch k. A backward through what is returned uses the kept derivatives."""
        return self._hooked(k, outputs, self._used)

    def _used(self, key: _Key, derivative: Tensor) -> Tensor:
        kept = self._kept.pop(key, None)
        return torch.zeros_like(derivative) if kept is None else kept  # None: the loss did not depend on this output

    def _hooked(self, k: int, outputs: Any, hook: Any) -> Any:
        place = -1

        def hooked(leaf: Any) -> Any:
            nonlocal place
            place += 1
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                return leaf
            # An alias: the derivative by an output that another output is computed from must not include that path.
            alias = leaf.view_as(leaf)
            alias.register_hook(partial(hook, (k, place)))  # type: ignore[no-untyped-call]
            return alias

        return tree_map(hooked, outputs)
