"""Activation checkpointing: what is computed again in backward, when whatever was around the forward is over."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deltasam._torch import checkpoints_wrapped

Compute = Callable[[], Any]

UNKNOWN = (
    "this version of torch has another activation checkpointing than those known: do not combine it with Contrastive, "
    "or with noise on embeddings, inside of which it cannot be followed; without it all is well"
)


@contextmanager
def computed_again(by: Callable[[Compute], Any]) -> Iterator[None]:
    """What is checkpointed inside is computed again as ``by(compute)`` when backward comes to it.

    Warns where this version of torch does not allow it.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: by(lambda: function(*args, **kwargs))

    with checkpoints_wrapped(wrap) as is_possible:
        if not is_possible:
            warnings.warn(UNKNOWN, stacklevel=2)
        yield
