"""What the engine keeps of a model from step to step: how its inputs are laid out, what was verified, the proxies."""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from deltasam.objectives.nesting import layers
from deltasam.per_instance.interception.layout import Layout
from deltasam.per_instance.interception.tensors import CallKey, Kind, LayoutTable, Proxy

#: Perturbed parameters; what was read where, and how often; instances per group, 0 for a single one; not at w; the
#: kind of the objective.
Signature = tuple[tuple[str, ...], frozenset[tuple[CallKey, tuple[Kind, int]]], int, bool, Hashable]


@dataclass
class Memory:
    """Lives as long as the model.

    Attributes:
        reading: How tensors are read whose shapes leave open where the instances are.
        layouts: Layouts found so far, see :meth:`PassState.layout`; whatever is learned about the reading empties it.
        verified: The signatures of passes whose gradients were compared with autograd's.
        told: Messages that were given.
    """

    reading: LayoutTable = field(default_factory=LayoutTable)
    verified: set[Signature] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    layouts: dict[Any, Layout] = field(default_factory=dict)
    _proxies: dict[int, tuple[Proxy, tuple[Any, ...]]] = field(default_factory=dict)

    def learn(self, kinds: Mapping[CallKey, Kind]) -> None:
        """Reads these places in this way from now on."""
        self.reading.kinds.update(kinds)
        self.layouts.clear()

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
    """Warns, once for each model and message; the same one with other numbers (shapes) is the same."""
    told, words = memory_of(model).told, re.sub(r"\d+", "#", message)
    if words not in told:
        told.add(words)
        warnings.warn(message, stacklevel=2)


def kind_of(objective: Any) -> Hashable:
    """What tells objectives apart: the code of a function or the class of an object, and what it was made with.

    Not the objective itself, which may be made anew for every step: a comparison costs two steps.
    """
    return tuple(kind for each in layers(objective) for kind in (_code(each), *_settings(each)))


def _code(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", type(function))


def _settings(function: Any) -> Iterator[Hashable]:
    """The switches, words and functions that it was made with: how instances are treated may hang on them.

    Numbers do not count: they change from step to step, as counters and schedules do.
    """
    while isinstance(function, partial):
        yield from _told(function.args)
        yield from _told(function.keywords.values())
        function = function.func
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # nothing is in it yet
            yield from _told([cell.cell_contents])
    yield from _told(getattr(getattr(function, "__self__", function), "__dict__", {}).values())


def _told(values: Iterable[Any]) -> Iterator[Hashable]:
    for value in values:
        if isinstance(value, (bool, str)):
            yield value
        elif callable(value):
            yield _code(value)


def memory_of(model: nn.Module) -> Memory:
    """The memory of a model, empty at first."""
    return _MEMORIES.setdefault(model, Memory())
