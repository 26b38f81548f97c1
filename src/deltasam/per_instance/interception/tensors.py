"""Two kinds of tensor that let an unchanged model compute with other weights for every instance.

While a pass is under way, each perturbed parameter is stood in for by a :class:`Proxy`; whatever operation meets one
is handed to the rules. A value that the model computes once for the whole batch (position embeddings, biases by
relative position, class tokens) but that now differs between instances is a :class:`PerInstance`: the model sees the
shape it expects, and the instances are a hidden dimension in front, until the value meets the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from deltasam._torch import no_torch_function, tree_flatten, tree_unflatten
from deltasam.per_instance.verification.errors import COMMON, NoRuleError, of_a_rule

if TYPE_CHECKING:
    from deltasam.per_instance.interception.calls import PassState


#: Where a batch holds several rows per instance: one instance after the other, or the batch several times over.
Order = Literal["flat", "tiled"]
Kind = Literal["batch", "flat", "tiled", "shared", "hidden"]

#: A place where a shape leaves open what the instances are: the parameter or operation, the dimensions, rows == N.
CallKey = tuple[str, int, bool]


@dataclass
class LayoutTable:
    """How the tensors of a model are read where their shapes leave it open.

    Attributes:
        order: How rows of the same instance lie in a batch with several per instance.
        kinds: What was found out about single places.
        seen: The places of the pass under way, how they were read, and how often: a table that looks like a batch in
            some lengths only is one more. Readings that were not compared with autograd's gradient are told by it.
    """

    order: Order = "flat"
    kinds: dict[CallKey, Kind] = field(default_factory=dict)
    seen: dict[CallKey, tuple[Kind, int]] = field(default_factory=dict)

    def note(self, key: CallKey, kind: Kind) -> None:
        """One more tensor that was read in this way."""
        known = self.seen.get(key)
        self.seen[key] = (kind, 1 if known is None else known[1] + 1)

    def takes(self, operation: str, ndim: int, rows: int, size: int) -> bool:
        """Whether an operation without a rule takes a tensor of k N rows for the batch; noted."""
        key = (f"{operation}()", ndim, rows == size)
        kind = self.kinds.get(key, "batch")
        self.note(key, kind)
        return kind != "shared"


class PerInstance(Tensor):
    """A tensor of one value per instance that looks like a single value: ``inner`` is ``(N, *shape)``."""

    inner: Tensor  # type: ignore[assignment]
    reading: LayoutTable

    @staticmethod
    def wrap(inner: Tensor, reading: LayoutTable) -> Tensor:
        """``inner`` in disguise; with a single instance there is nothing to hide."""
        if inner.shape[0] == 1:
            return inner.squeeze(0)
        seen = inner.detach()[0].requires_grad_(inner.requires_grad).as_subclass(PerInstance)
        seen.inner, seen.reading = inner, reading
        return seen

    def beside(self, rows: int, ndim: int) -> Tensor | None:
        """As a batch that broadcasts against the model's own of ``rows`` rows, or None if it has no room for it."""
        shape = self.inner.shape[1:]
        padded = (1,) * (ndim - len(shape)) + tuple(shape)
        if len(padded) != ndim or padded[0] != 1:
            return None
        own = self.inner.reshape(-1, *padded[1:])
        times = rows // own.shape[0]
        if times == 1:
            return own
        return (
            own.repeat_interleave(times, 0) if self.reading.order == "flat" else own.repeat(times, *(1,) * (ndim - 1))
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class Proxy(Tensor):
    """Stands in for a parameter during a pass; shares its memory, so nothing is copied."""

    parameter: Tensor
    state: PassState

    @staticmethod
    def of(parameter: Tensor) -> Proxy:
        proxy = parameter.detach().as_subclass(Proxy)
        proxy.parameter = parameter
        return proxy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


#: What to do for an operation, filled by ``register_rule``.
RULES: dict[Any, Callable[..., Any]] = {}

#: Getters that give tensors that must follow the perturbation; all other attributes are read from what the model sees.
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

#: Operations whose operands have the batch in front or broadcast over it: the instances are put in front too.
_BROADCASTING = {
    "__add__", "__iadd__", "__imul__", "__isub__", "__itruediv__", "__mul__", "__pow__", "__radd__", "__rmul__",
    "__rsub__", "__rtruediv__", "__setitem__", "__sub__", "__truediv__", "add", "add_", "addcdiv", "addcmul",
    "baddbmm", "bmm", "cat", "concat", "concatenate", "copy_", "div", "div_", "expand_as", "floor_divide", "lerp",
    "masked_fill", "maximum", "minimum", "mul", "mul_", "pow", "rsub", "scaled_dot_product_attention", "sub", "sub_",
    "true_divide", "where",
}  # fmt: skip


def instances_first(tensor: Tensor, size: int, order: Order) -> Tensor:
    """A batch of k N rows as ``(N, k, ...)``."""
    if order == "flat" or tensor.shape[0] == size:
        return tensor.reshape(size, -1, *tensor.shape[1:])
    return tensor.reshape(-1, size, *tensor.shape[1:]).transpose(0, 1)


def instances_back(tensor: Tensor, order: Order) -> Tensor:
    """Undoes :func:`instances_first`."""
    return (tensor if order == "flat" or tensor.shape[1] == 1 else tensor.transpose(0, 1)).flatten(0, 1)


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation of the model that meets a :class:`Proxy` or a :class:`PerInstance`."""
    func = Tensor.detach if func == _DATA else func  # what stands there has to follow the perturbation
    rule = RULES.get(func)
    if rule is not None:
        for value in (*args, *kwargs.values()):
            if type(value) is Proxy:
                try:
                    output = rule(value.state, *args, **kwargs)
                except COMMON as error:
                    told = of_a_rule(error, rule, func)
                    if told is None:
                        raise
                    raise told from error
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
    """The operation for every instance: beside the batch if it meets the batch, else in the hidden dimension."""
    hidden = [leaf for leaf in leaves if isinstance(leaf, PerInstance)]
    size, reading = hidden[0].inner.shape[0], hidden[0].reading
    order = reading.order
    name = getattr(func, "__name__", "")
    open_ones = [leaf for leaf in leaves if _may_be_batch(leaf, size)]
    batch = [leaf for leaf in open_ones if reading.takes(name, leaf.ndim, leaf.shape[0], size)]
    if name in ("expand", "broadcast_to", "repeat"):
        grown = _grown(name, hidden[0], leaves)
        if grown is not None:
            return grown
    if batch and name in _BROADCASTING:
        rows, ndim = max(leaf.shape[0] for leaf in batch), max(leaf.ndim for leaf in batch)
        beside = [leaf.beside(rows, ndim) if isinstance(leaf, PerInstance) else leaf for leaf in leaves]
        if all(value is not None or leaf is None for value, leaf in zip(beside, leaves, strict=True)):
            again, keywords = tree_unflatten(beside, spec)
            return func(*again, **keywords)
        batch = []
    # Each instance sees a batch of its own rows alone.
    where = [
        k for k, leaf in enumerate(leaves) if isinstance(leaf, PerInstance) or any(leaf is other for other in batch)
    ]
    own = [
        leaf.inner if isinstance(leaf, PerInstance) else instances_first(leaf, size, order)
        for leaf in map(leaves.__getitem__, where)
    ]

    def once(*values: Tensor) -> Any:
        given = list(leaves)
        for k, value in zip(where, values, strict=True):
            given[k] = value
        again, keywords = tree_unflatten(given, spec)
        return func(*again, **keywords)

    def back(value: Tensor) -> Tensor:
        return instances_back(value, order) if batch else PerInstance.wrap(value, reading)

    with no_torch_function(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        output = torch.func.vmap(once, randomness="same")(*own)
    return type(output)(map(back, output)) if isinstance(output, (tuple, list)) else back(output)


def _may_be_batch(leaf: Any, size: int) -> bool:
    if not isinstance(leaf, Tensor) or isinstance(leaf, PerInstance) or leaf.ndim == 0:
        return False
    several = leaf.shape[0] % size == 0 and leaf.is_floating_point()
    return leaf.shape[0] == size or (several and leaf.shape[0] > 0)


def _grown(name: str, value: PerInstance, leaves: list[Any]) -> Tensor | None:
    """``expand(N, ...)`` and ``repeat(N, 1, ...)`` turn one value into a batch: here the instances come out."""
    numbers = [leaf for leaf in leaves if isinstance(leaf, int)]
    inner, shape = value.inner, tuple(value.inner.shape[1:])
    size, ndim = inner.shape[0], len(numbers)
    if not numbers or numbers[0] < size or numbers[0] % size or ndim < len(shape):
        return None
    if not value.reading.takes(name, ndim, numbers[0], size):
        return None
    own = value.beside(numbers[0], ndim)
    if name != "repeat":
        return None if own is None else own.expand(numbers[0], *numbers[1:])
    if own is not None:
        return own.repeat(1, *numbers[1:])
    plain = numbers[0] == size and ndim == len(shape) and all(number == 1 for number in numbers[1:])
    return inner.flatten(0, 1) if plain else None
