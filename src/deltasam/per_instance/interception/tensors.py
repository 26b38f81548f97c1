"""The two kinds of tensor with which an unchanged model computes with different weights for every instance.

During a pass a :class:`Proxy` replaces each perturbed parameter; every operation that is called with one is passed to
the rules. A :class:`PerInstance` is a value that the model computes once for the batch (position embeddings, relative
position biases, class tokens) but that now differs between the instances: the model sees the shape it expects, and the
instances are a hidden dimension in front, until the value is combined with the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deltasam._torch import no_torch_function, tree_flatten, tree_unflatten
from deltasam.per_instance.errors import COMMON, NoRuleError, explain_rule_error
from deltasam.per_instance.interception.batch_rule import LayoutTable, Place


class PerInstance(Tensor):
    """One value per instance that looks like a single value: ``inner`` is ``(N, *shape)``."""

    inner: Tensor  # type: ignore[assignment]
    layout_table: LayoutTable

    @staticmethod
    def wrap(inner: Tensor, table: LayoutTable) -> Tensor:
        """Hides the instances of ``inner``; with a single instance there is nothing to hide."""
        if inner.shape[0] == 1:
            return inner.squeeze(0)
        visible = inner.detach()[0].requires_grad_(inner.requires_grad).as_subclass(PerInstance)
        visible.inner, visible.layout_table = inner, table
        return visible

    def as_batch(self, rows: int, ndim: int) -> Tensor | None:
        """As a tensor that broadcasts against a batch of ``rows`` rows; None if its leading dimension is not free."""
        shape = self.inner.shape[1:]
        padded = (1,) * (ndim - len(shape)) + tuple(shape)
        if len(padded) != ndim or padded[0] != 1:
            return None
        own = self.inner.reshape(-1, *padded[1:])
        times = rows // own.shape[0]
        if times == 1:
            return own
        return own.repeat(times, *(1,) * (ndim - 1)) if self.layout_table.tiled else own.repeat_interleave(times, 0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operation on such a tensor."""
        return dispatch(func, args, kwargs or {})


class Proxy(Tensor):
    """Replaces a parameter during a pass; shares its memory, so nothing is copied."""

    parameter: Tensor
    state: Any  # the PassState of the pass

    @staticmethod
    def of(parameter: Tensor) -> Proxy:
        """A proxy for this parameter."""
        proxy = parameter.detach().as_subclass(Proxy)
        proxy.parameter = parameter
        return proxy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operation on such a tensor."""
        return dispatch(func, args, kwargs or {})


def unwrapped(value: Any) -> Any:
    """The parameter behind a proxy; any other value as it is."""
    return value.parameter if isinstance(value, Proxy) else value


#: The rules by operation, see ``register_rule``.
RULES: dict[Any, Callable[..., Any]] = {}

#: Attributes that are tensors and must follow the perturbation; all others are read from the visible tensor.
_TENSOR_GETTERS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]

_METADATA: set[Any] = {
    getattr(Tensor, name)
    for name in (
        "size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex", "element_size",
        "data_ptr", "storage_offset", "is_contiguous", "get_device", "__len__", "untyped_storage", "__repr__",
        "__format__", "requires_grad_", "is_pinned", "__hash__", "is_set_to", "is_shared", "type_as",
    )
} | {torch.numel, torch.is_floating_point, torch.is_complex}  # fmt: skip

#: Operations whose operands have the batch in front or broadcast over it: a PerInstance takes part as a batch.
_BROADCASTING = {
    "__add__", "__iadd__", "__imul__", "__isub__", "__itruediv__", "__mul__", "__pow__", "__radd__", "__rmul__",
    "__rsub__", "__rtruediv__", "__setitem__", "__sub__", "__truediv__", "add", "add_", "addcdiv", "addcmul",
    "baddbmm", "bmm", "cat", "concat", "concatenate", "copy_", "div", "div_", "expand_as", "floor_divide", "lerp",
    "masked_fill", "maximum", "minimum", "mul", "mul_", "pow", "rsub", "scaled_dot_product_attention", "sub", "sub_",
    "true_divide", "where",
}  # fmt: skip

#: Operations that spread values over the rows of the whole batch: an instance alone does not see which are its own.
_SPREADING = {
    f"{name}{end}" for name in ("masked_scatter", "index_add", "index_copy", "index_put") for end in ("", "_")
}  # fmt: skip


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Carries out one operation that is called with a :class:`Proxy` or a :class:`PerInstance`."""
    func = Tensor.detach if func == _DATA else func  # .data must follow the perturbation, too
    rule = RULES.get(func)
    if rule is not None:
        for value in (*args, *kwargs.values()):
            if type(value) is Proxy:
                try:
                    output = rule(value.state, *args, **kwargs)
                except COMMON as error:
                    explained = explain_rule_error(error, rule, func)
                    if explained is None:
                        raise
                    raise explained from error
                if output is not NotImplemented:
                    return output
                break
    elif func in _METADATA or (
        getattr(func, "__name__", "") in ("__get__", "__set__") and func not in _TENSOR_GETTERS
    ):
        with no_torch_function():
            return func(*args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    proxies = [leaf for leaf in leaves if isinstance(leaf, Proxy)]
    if proxies:
        state = proxies[0].state
        leaves = [state.expanded(leaf) if isinstance(leaf, Proxy) else leaf for leaf in leaves]
        if state.size == 1:
            again, keywords = tree_unflatten(leaves, spec)
            return func(*again, **keywords)
    try:
        return vectorised(func, leaves, spec)
    except RuntimeError as error:
        if not proxies or isinstance(error, NoRuleError):
            raise
        raise NoRuleError(
            getattr(func, "__name__", str(func)), [state.names[id(p.parameter)] for p in proxies]
        ) from error


def vectorised(func: Any, leaves: list[Any], spec: Any) -> Any:
    """The operation for every instance: on batches if one takes part, else in the hidden dimension."""
    hidden = [leaf for leaf in leaves if isinstance(leaf, PerInstance)]
    size, table = hidden[0].inner.shape[0], hidden[0].layout_table
    name = getattr(func, "__name__", "")
    batch = [leaf for leaf in leaves if _is_batch(leaf, size)]
    for leaf in batch:
        table.note(Place(f"{name}()", leaf.ndim, leaf.shape[0] == size), "batch")
    if batch and name in _SPREADING:
        raise RuntimeError(f"{name} spreads a value that differs between the instances over the rows of the batch")
    if name in ("expand", "broadcast_to", "repeat"):
        grown = _grown(name, hidden[0], leaves)
        if grown is not None:
            return grown
    if batch and name in _BROADCASTING:
        rows, ndim = max(leaf.shape[0] for leaf in batch), max(leaf.ndim for leaf in batch)
        batches = [leaf.as_batch(rows, ndim) if isinstance(leaf, PerInstance) else leaf for leaf in leaves]
        if all(value is not None or leaf is None for value, leaf in zip(batches, leaves, strict=True)):
            again, keywords = tree_unflatten(batches, spec)
            return func(*again, **keywords)
        batch = []
    # Each instance sees a batch that holds its own rows only.
    where = [
        k for k, leaf in enumerate(leaves) if isinstance(leaf, PerInstance) or any(leaf is other for other in batch)
    ]
    own = [
        leaf.inner if isinstance(leaf, PerInstance) else table.instances_first(leaf, size)
        for leaf in map(leaves.__getitem__, where)
    ]

    def once(*values: Tensor) -> Any:
        given = list(leaves)
        for k, value in zip(where, values, strict=True):
            given[k] = value
        again, keywords = tree_unflatten(given, spec)
        return func(*again, **keywords)

    def back(value: Tensor) -> Tensor:
        return table.instances_back(value) if batch else PerInstance.wrap(value, table)

    with no_torch_function(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        output = torch.func.vmap(once, randomness="same")(*own)
    return type(output)(map(back, output)) if isinstance(output, (tuple, list)) else back(output)


def _is_batch(leaf: Any, size: int) -> bool:
    """The rule of ``batch_rule``; integers (indices, masks) of k N rows, k > 1, are shared."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, PerInstance) or leaf.ndim == 0:
        return False
    rows = leaf.shape[0]
    return rows == size or (rows > 0 and rows % size == 0 and leaf.is_floating_point())


def _grown(name: str, value: PerInstance, leaves: list[Any]) -> Tensor | None:
    """``expand(N, ...)`` and ``repeat(N, 1, ...)`` make a batch of one value, in which the instances are visible."""
    numbers = [leaf for leaf in leaves if isinstance(leaf, int)]
    inner, shape = value.inner, tuple(value.inner.shape[1:])
    size, ndim = inner.shape[0], len(numbers)
    if not numbers or numbers[0] < size or numbers[0] % size or ndim < len(shape):
        return None
    value.layout_table.note(Place(f"{name}()", ndim, numbers[0] == size), "batch")
    own = value.as_batch(numbers[0], ndim)
    if name != "repeat":
        return None if own is None else own.expand(numbers[0], *numbers[1:])
    if own is not None:
        return own.repeat(1, *numbers[1:])
    plain = numbers[0] == size and ndim == len(shape) and all(number == 1 for number in numbers[1:])
    return inner.flatten(0, 1) if plain else None
