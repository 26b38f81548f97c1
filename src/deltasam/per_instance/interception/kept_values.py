"""Values that a model makes from a parameter and keeps in an attribute or a buffer: for a log, or a running mean.

During a pass they are made from proxies. Afterwards they must be plain tensors again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from deltasam._torch import buffers_of
from deltasam.per_instance.interception.memory import Memory
from deltasam.per_instance.interception.tensors import PerInstance, Proxy

#: The path of a module, whether the value is a buffer, and its name.
Kept = tuple[str, bool, str]


def kept_values(model: nn.Module) -> set[Kept]:
    """Where the model keeps a value that the current pass has made from a parameter. Looks at all modules."""
    return {
        (path, is_buffer, name)
        for path, module in model.named_modules()
        for is_buffer, own in ((False, vars(module)), (True, buffers_of(module)))
        for name, value in own.items()
        if isinstance(value, (PerInstance, Proxy))
    }


@contextmanager
def plain_afterwards(model: nn.Module, memory: Memory, *, is_at_w: bool) -> Iterator[None]:
    """Makes plain tensors of the values in ``memory.kept``, to which a pass that fails adds all that it has left.

    A pass at w leaves its own values, as a plain pass does; a perturbed one those from before.
    """
    before = [] if is_at_w else [(own, name, own.get(name)) for own, name in _places(model, memory)]
    try:
        yield
    except BaseException:
        memory.kept |= kept_values(model)
        raise
    finally:
        for own, name, value in before:
            if isinstance(own.get(name), (PerInstance, Proxy)) and isinstance(value, Tensor):
                own[name] = value
        for own, name in _places(model, memory):
            own[name] = _plain(own.get(name))


def _places(model: nn.Module, memory: Memory) -> list[tuple[dict[str, Any], str]]:
    if not memory.kept:
        return []
    modules = dict(model.named_modules())
    found = [(modules[path], is_buffer, name) for path, is_buffer, name in memory.kept if path in modules]
    owners: list[tuple[Any, str]] = [
        (buffers_of(module) if is_buffer else vars(module), name) for module, is_buffer, name in found
    ]
    return [(own, name) for own, name in owners if name in own]


def _plain(value: Any) -> Any:
    """What a value of a pass at w stands for: there it is the same for all instances."""
    if isinstance(value, PerInstance):
        return value.inner.detach()[0].clone()
    return value.parameter if isinstance(value, Proxy) else value
