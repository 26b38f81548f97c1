"""What the engine keeps of a model from step to step: how its inputs are laid out, what was verified, the proxies."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from deltasam.instances._layout import Kind, Layout
from deltasam.instances._step import CallKey
from deltasam.instances._tensors import Order, Proxy

Signature = frozenset[tuple[CallKey, Kind]]


@dataclass
class Memory:
    """Lives as long as the model.

    Attributes:
        order: How rows of the same instance lie in a batch with several per instance.
        kinds: Layouts of inputs whose shape leaves them open.
        layouts: Layouts found so far, see :meth:`PassState.layout`; a finding of ``order`` or ``kinds`` empties it.
        verified: The signatures of passes whose gradients were compared with autograd's.
        told: Messages that were given.
    """

    order: Order = "flat"
    kinds: dict[CallKey, Kind] = field(default_factory=dict)
    verified: set[tuple[tuple[str, ...], Signature]] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    layouts: dict[Any, tuple[Layout, CallKey | None]] = field(default_factory=dict)
    _proxies: dict[int, tuple[Proxy, tuple[Any, ...]]] = field(default_factory=dict)

    def proxies(self, params: Iterable[Tensor]) -> dict[int, Proxy]:
        """A stand-in for each parameter, by ``id``; one made earlier if the parameter is still what it was."""
        kept, self._proxies = self._proxies, {}
        for p in params:
            known, now = kept.get(id(p)), (p.data_ptr(), p.shape, p.dtype, p.device)
            if known is None or known[0].parameter is not p or known[1] != now:
                known = (Proxy.of(p), now)
            self._proxies[id(p)] = known
        return {name: proxy for name, (proxy, _) in self._proxies.items()}


_MEMORIES: WeakKeyDictionary[nn.Module, Memory] = WeakKeyDictionary()


def tell_once(model: nn.Module, message: str) -> None:
    """Warns, once for each model and message."""
    told = memory_of(model).told
    if message not in told:
        told.add(message)
        warnings.warn(message, stacklevel=2)


def memory_of(model: nn.Module) -> Memory:
    """The memory of a model, empty at first."""
    return _MEMORIES.setdefault(model, Memory())
