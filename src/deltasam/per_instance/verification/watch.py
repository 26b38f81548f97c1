"""What a pass does that two ways to the same losses may differ by: random draws, and rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltasam._torch import TorchDispatchMode, argument_names, tree_leaves


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks on while a pass is made.

    Attributes:
        draws: Whether an operation drew at random. The masks of a dropout are others where its input is laid out in
            another way, whatever the seed.
        eps: The coarsest rounding of the tensors that were computed; parameters and losses need not show it.
    """

    supports_higher_order_operators = True  # flex_attention is one

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        found = func(*args, **options)
        self.draws = self.draws or _draws(func, args, options)
        floats = (t.dtype for t in tree_leaves(found) if isinstance(t, Tensor) and t.is_floating_point())
        self.eps = max([self.eps, *(torch.finfo(dtype).eps for dtype in floats)])
        return found


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):  # operators of higher order have none
        return False
    # The kernels of attention have the tag whether or not they drop anything.
    names = argument_names(func)
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    given = kwargs.get("dropout_p", args[at] if at < len(args) else 0.0)
    return bool(given > 0)
