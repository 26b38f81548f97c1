"""Counts the passes through a model, and through copies of it, by hooks, whatever the method claims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook


@dataclass
class PassCount:
    """Passes in units of the whole batch: a pass over half of the instances counts one half."""

    forwards: float = 0.0
    backwards: float = 0.0


@contextmanager
def counted_passes(model: nn.Module, size: int) -> Iterator[PassCount]:
    """Counts the forward passes through the model, and the backward passes through its output.

    A copy of the model, such as SMART's teacher, costs as much as the model itself: it counts, too, also if it was
    made before. So the hook is on all modules, and looks for those that are the model or built like it.

    Args:
        model: The model that is called.
        size: Instances in the batch; a pass over n instances counts n / size.

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
    """The tensor of an output that the loss is computed from: itself, its logits, or its first entry."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else _first_tensor(output[0])
