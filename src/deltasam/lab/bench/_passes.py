"""Counts the passes through a model and its copies with hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook


@dataclass
class PassCount:
    """Number of passes in units of the batch: a pass over half of the instances counts as one half."""

    forwards: float = 0.0
    backwards: float = 0.0


@contextmanager
def counted_passes(model: nn.Module, size: int) -> Iterator[PassCount]:
    """Counts the forward passes through the model, and the backward passes through its output.

    A copy of the model, such as SMART's teacher, costs as much as the model and counts, too, even if it was created
    earlier. So the hook is global and looks for modules of the same class and size as the model.

    Args:
        model: The model.
        size: Number of instances in the batch. A pass over n instances counts as n / size.

    Yields:
        The running count.
    """
    count = PassCount()
    parts, parameters = set(model.modules()), len(list(model.parameters()))

    def is_copy(module: nn.Module) -> bool:
        alike = type(module) is type(model) and module not in parts
        return alike and len(list(module.parameters())) == parameters

    def after_forward(module: nn.Module, _: Any, output: Any) -> None:
        if module is not model and not is_copy(module):
            return
        tensor = _first_tensor(output)
        share = tensor.shape[0] / size
        count.forwards += share
        if tensor.requires_grad:

            def after_backward(_: Tensor) -> None:
                count.backwards += share

            tensor.register_hook(after_backward)  # type: ignore[no-untyped-call]

    handle = register_module_forward_hook(after_forward)
    try:
        yield count
    finally:
        handle.remove()


def _first_tensor(output: Any) -> Tensor:
    """Returns the tensor from which the loss is computed: the output, its logits, or its first entry."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else _first_tensor(output[0])
