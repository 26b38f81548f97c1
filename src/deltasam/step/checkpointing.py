"""Activation checkpointing: recomputes parts of the forward in backward, when the forward's context has been left."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deltasam._torch import checkpoints_wrapped

Compute = Callable[[], Any]

UNKNOWN = (
    "this version of torch implements activation checkpointing in an unknown way: do not combine it with Contrastive "
    "or with noise on embeddings, or install a version of torch that deltasam is tested with"
)


@contextmanager
def computed_again(by: Callable[[Compute], Any]) -> Iterator[None]:
    """Functions that are checkpointed inside are recomputed in backward as ``by(compute)``.

    Warns if this version of torch does not allow it.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: by(lambda: function(*args, **kwargs))

    with checkpoints_wrapped(wrap) as is_possible:
        if not is_possible:
            warnings.warn(UNKNOWN, stacklevel=2)
        yield
