"""Passes without proxies, for comparisons: they do not change the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from deltasam._torch import version_of
from deltasam.per_instance.errors import ModelError
from deltasam.per_instance.interception.slots import eager
from deltasam.step.model_buffers import ModelBuffers

Run = Callable[[], Tensor]


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Runs the model uncompiled, and restores its buffers: a pass that rewinds the step writes to the real ones."""
    kept = [(b, _version(b), b.detach().clone()) for b in model.buffers()]
    try:
        with ModelBuffers(model).rewound(), eager():
            yield
    finally:
        with torch.no_grad():
            for buffer, version, value in kept:
                if _version(buffer) != version:
                    buffer.copy_(value)


def _version(buffer: Tensor) -> int:
    """Changes with every write. Only changed buffers are restored: a graph that saved a buffer forbids writes."""
    return 0 if buffer.is_inference() else version_of(buffer)


def plain_losses(model: nn.Module, run: Run) -> Tensor:
    """The losses, with their graph, of a pass without proxies.

    Raises:
        ModelError: The pass fails, so the error is the model's and not the engine's.
    """
    try:
        with torch.enable_grad(), without_trace(model):
            return run()
    except Exception as error:
        raise ModelError(error) from error
