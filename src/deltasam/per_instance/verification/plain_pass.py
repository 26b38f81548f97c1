"""Passes without proxies, which only a comparison needs: they leave no trace in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from deltasam._torch import version_of
from deltasam.per_instance.errors import ModelError
from deltasam.per_instance.interception.slots import eager
from deltasam.step.gradients import graph_of
from deltasam.step.model_buffers import ModelBuffers

Run = Callable[[], Tensor]


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Restores the buffers afterwards, and runs the model uncompiled.

    A pass that starts by rewinding the step writes to the buffers of the model itself, whatever was lent to it.
    """
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
    """Changes with every write. An unchanged buffer is not restored: a graph that saved it allows no write."""
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


def reached_from(losses: Tensor) -> set[int]:
    """The parameters (by ``id``) that the graph of the losses leads to."""
    return {id(node.variable) for node in graph_of(losses) if hasattr(node, "variable")}
