"""What the engine keeps of a model from step to step: layouts, verified passes, proxies, and the warnings it gave."""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from deltasam.per_instance.errors import InstancesMixedError, MisreadError, UncoveredError
from deltasam.per_instance.interception.batch_rule import LayoutTable, Place
from deltasam.per_instance.interception.layout import Layout
from deltasam.per_instance.interception.tensors import Proxy


@dataclass
class Memory:
    """Lives as long as the model."""

    layout_table: LayoutTable = field(default_factory=LayoutTable)
    layouts: dict[Any, Layout] = field(default_factory=dict)  # a cache, see PassState.layout
    straight: set[Hashable] = field(default_factory=set)  # inputs before which no rows move, see PassState.layout
    verified: set[Hashable] = field(default_factory=set)  # signatures of passes that were compared with autograd
    warned: set[str] = field(default_factory=set)
    rows: dict[Hashable, int] = field(default_factory=dict)  # of the batch per instance, by kind of objective
    mixes_rows: bool = False  # a pass has reordered rows by their content
    kept: set[tuple[str, bool, str]] = field(default_factory=set)  # see kept_values
    places: list[list[Any]] | None = None  # of the parameters in memory that were found to be apart
    _proxies: dict[int, tuple[Proxy, tuple[Any, ...]]] = field(default_factory=dict)

    def correct(self, misread: MisreadError) -> None:
        """Reads the tensors of the model in another way from now on."""
        self.layout_table.tiled |= misread.tiled
        self.layout_table.shared |= misread.shared
        self.layouts.clear()

    @contextmanager
    def read_as_shared(self, places: Set[Place]) -> Iterator[None]:
        """Reads these inputs as shared by all instances for the passes inside."""
        before = set(self.layout_table.shared)
        self.layout_table.shared |= places
        self.layouts.clear()
        try:
            yield
        finally:
            self.layout_table.shared = before
            self.layouts.clear()

    @contextmanager
    def corrections(self) -> Iterator[None]:
        """Drops the corrections made inside if the model is refused."""
        table = self.layout_table
        before = table.tiled, frozenset(table.shared)
        try:
            yield
        except (InstancesMixedError, UncoveredError):
            table.tiled, table.shared = before[0], set(before[1])
            self.layouts.clear()
            raise

    def proxies(self, params: Sequence[Tensor], *, are_known: bool) -> dict[int, Proxy]:
        """A proxy for each parameter, by ``id``; an earlier one if the parameter is still the same."""
        if are_known and self._proxies.keys() >= set(map(id, params)):
            return {name: proxy for name, (proxy, _) in self._proxies.items()}
        kept, self._proxies = self._proxies, {}
        for p in params:
            known, now = kept.get(id(p)), (p.data_ptr(), p.shape, p.dtype, p.device)
            if known is None or known[0].parameter is not p or known[1] != now:
                known = (Proxy.of(p), now)
            self._proxies[id(p)] = known
        return {name: proxy for name, (proxy, _) in self._proxies.items()}


_MEMORIES: WeakKeyDictionary[nn.Module, Memory] = WeakKeyDictionary()


def memory_of(model: nn.Module) -> Memory:
    """The memory of a model, empty at first."""
    return _MEMORIES.setdefault(model, Memory())


def warn_once(model: nn.Module, message: str) -> None:
    """Warns once per model and message; messages that differ in numbers (shapes) only count as one."""
    warned, pattern = memory_of(model).warned, re.sub(r"\d+", "#", message)
    if pattern not in warned:
        warned.add(pattern)
        warnings.warn(message, stacklevel=2)
