"""Activation checkpointing: what is computed again in backward, when whatever was around the forward is over."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Compute = Callable[[], Any]

UNKNOWN = (
    "this version of torch has another activation checkpointing than those known: do not combine it with Contrastive, "
    "or with noise on embeddings, inside of which it cannot be followed; without it all is well"
)


@contextmanager
def computed_again(by: Callable[[Compute], Any]) -> Iterator[None]:
    """What is checkpointed inside is computed again as ``by(compute)`` when backward comes to it.

    A function of torch's own is exchanged for it, as a model's calls of ``torch.utils.checkpoint`` cannot be seen.
    Where a version of torch does not have it, nothing is exchanged, and a warning says so.
    """
    from torch.utils import checkpoint  # late: with torch 2.6 this takes half a second

    module: Any = checkpoint
    own = getattr(module, "_checkpoint_without_reentrant_generator", None)
    if own is None:
        warnings.warn(UNKNOWN, stacklevel=2)
        yield
        return

    def generator(function: Callable[..., Any], *rest: Any, **options: Any) -> Any:
        def again(*args: Any, **kwargs: Any) -> Any:
            return by(lambda: function(*args, **kwargs))

        return own(again, *rest, **options)

    module._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = own
