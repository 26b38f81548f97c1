"""Activation checkpointing: what is computed again in backward, when whatever was around the forward is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Compute = Callable[[], Any]


@contextmanager
def computed_again(by: Callable[[Compute], Any]) -> Iterator[None]:
    """What is checkpointed inside is computed again as ``by(compute)`` when backward comes to it.

    A function of torch's own is exchanged for it, as a model's calls of ``torch.utils.checkpoint`` cannot be seen.
    """
    from torch.utils import checkpoint  # late: with torch 2.6 this takes half a second

    module: Any = checkpoint
    own = module._checkpoint_without_reentrant_generator

    def generator(function: Callable[..., Any], *rest: Any, **options: Any) -> Any:
        def again(*args: Any, **kwargs: Any) -> Any:
            return by(lambda: function(*args, **kwargs))

        return own(again, *rest, **options)

    module._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = own
