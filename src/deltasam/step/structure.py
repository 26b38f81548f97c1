"""The modules, parameters and buffers of a model, found in every step without walking through the model again.

``model.modules()`` and ``model.named_parameters()`` are recursive generators that compose names: for 200 parameters
they take as long as dozens of kernels, and a step needs both. Here the names are composed once per model. Every step
compares the model with what was seen last: its modules, their places, and the names in them. Parameters and buffers
are read anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from deltasam._torch import buffers_in, buffers_of, children_in, parameters_in

_Attributes = list[dict[str, Any]]  # of every module, vars(module)

_ITERATORS = ("modules", "named_modules", "parameters", "named_parameters", "buffers", "named_buffers")
_attributes_of, _requires_grad = attrgetter("__dict__"), attrgetter("requires_grad")
_training, _values = attrgetter("training"), methodcaller("values")


class _Slots:
    """The dictionaries of all modules of one kind: their sizes, and their names and values one after the other."""

    def __init__(self, owners: _Attributes) -> None:
        filled = list(filter(None, owners))
        self.layout = list(map(len, owners)), list(chain.from_iterable(filled))
        self.values = list(chain.from_iterable(map(_values, filled)))


class _Walk:
    """What one walk through a model has found. It keeps neither modules nor parameters alive."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        children, parameters = (_Slots([kind(vars(m)) for m in modules]) for kind in (children_in, parameters_in))
        place = {id(module): k for k, module in enumerate(modules)} | {id(None): -1}
        self._below = [ref(module) for module in modules[1:]]
        self._children = itemgetter(0, 0, *(place[id(child)] for child in children.values))  # always a tuple
        self._layouts = children.layout, parameters.layout
        prefixes = [f"{name}." if name else "" for name, _ in model.named_modules()]
        pairs = zip(prefixes, modules, strict=True)
        self._names = [prefix + name for prefix, module in pairs for name in parameters_in(vars(module))]
        self._keys: list[int] = []  # of the parameters: which of them are the same, or None
        self._is_listed: list[bool] = []
        self._are_listed = False  # all of them

    def modules(self, model: nn.Module) -> tuple[list[Any], _Attributes] | None:
        """All modules and their attributes, if they are the same ones in the same places; else None."""
        found: list[Any] = [model, *[each() for each in self._below]]
        if any(map(is_, found, repeat(None))):
            return None
        attributes = list(map(_attributes_of, found))
        now, places = _Slots(list(map(children_in, attributes))), [*found, None]
        same = now.layout == self._layouts[0] and all(map(is_, now.values, self._children(places)[2:]))
        return (found, attributes) if same else None

    def named(self, attributes: _Attributes) -> dict[str, nn.Parameter] | None:
        """The parameters by name, as ``named_parameters`` lists them, if their names are the same; else None."""
        now = _Slots(list(map(parameters_in, attributes)))
        if now.layout != self._layouts[1]:
            return None
        keys = list(map(id, now.values))
        if keys != self._keys:  # a tied parameter is listed once, None is not
            first = {key: k for k, key in reversed(list(enumerate(keys)))}
            self._is_listed = [first[key] == k and key != id(None) for k, key in enumerate(keys)]
            self._keys, self._are_listed = keys, all(self._is_listed)
        if self._are_listed:
            return dict(zip(self._names, now.values, strict=True))
        return dict(zip(compress(self._names, self._is_listed), compress(now.values, self._is_listed), strict=True))


_WALKS: WeakKeyDictionary[nn.Module, _Walk] = WeakKeyDictionary()


class Structure:
    """The modules, parameters and buffers of a model at the start of a step.

    Attributes:
        modules: All modules, each once, as ``model.modules()`` lists them.
        named: The parameters by name, as ``model.named_parameters()`` lists them.

    Cost: some sweeps over lists, in C. A walk through the model if its modules or names have changed.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> list(Structure(model).named), len(Structure(model).modules)
        (['0.weight', '0.bias'], 3)
    """

    def __init__(self, model: nn.Module) -> None:
        walk = _WALKS.get(model)
        found = None if walk is None else walk.modules(model)
        named = None if walk is None or found is None else walk.named(found[1])
        self._attributes: _Attributes | None = None  # None: the modules are not ordinary
        self._modes: bytes | None = None
        if found is not None and named is not None:
            self.modules, self.named = found[0], named
            self._attributes = found[1]
            return
        self.modules = list(model.modules())
        self.named = dict(model.named_parameters())
        _WALKS.pop(model, None)
        if _are_ordinary(self.modules):
            _WALKS[model] = _Walk(model, self.modules)
            self._attributes = list(map(_attributes_of, self.modules))

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that require gradients, by name."""
        flags = list(map(_requires_grad, self.named.values()))
        return self.named.copy() if all(flags) else dict(compress(self.named.items(), flags))

    @property
    def modes(self) -> bytes:
        """Which modules are in training mode: in another one a pass may write other buffers and draw other numbers."""
        if self._modes is None:
            self._modes = bytes(map(_training, self.modules))  # compiled modules compute it: it is not in vars(module)
        return self._modes

    @property
    def with_buffers(self) -> tuple[list[nn.Module], list[dict[str, Any]]]:
        """The modules that have buffers, and the dictionaries in which they hold them."""
        owners = list(map(buffers_of, self.modules) if self._attributes is None else map(buffers_in, self._attributes))
        return list(compress(self.modules, owners)), list(filter(None, owners))

    @property
    def size(self) -> tuple[int, int]:
        """The number of modules, and of all their attributes."""
        attributes = map(_attributes_of, self.modules) if self._attributes is None else self._attributes
        return len(self.modules), sum(map(len, attributes))


def _are_ordinary(modules: Sequence[nn.Module]) -> bool:
    """Whether torch's own functions list the modules, from dictionaries (not so in TorchScript)."""
    kinds = set(map(type, modules))
    if any(getattr(kind, name) is not getattr(nn.Module, name) for kind in kinds for name in _ITERATORS):
        return False
    try:
        for own in map(vars, modules):
            if not all(isinstance(kind(own), dict) for kind in (children_in, parameters_in, buffers_in)):
                return False
    except KeyError:
        return False
    return True
