"""Batches in nested containers: their instances, parts of them, and several batches that make up one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltasam._torch import version_of


class MicroBatches(tuple[Any, ...]):
    """Several batches that are treated as one: the step uses *one* perturbation for all of them, in two sweeps.

    ``method.backward(model, MicroBatches(parts), objective)`` equals ``method.backward`` on the large batch, with the
    activation memory of one part. It is a separate type because a ``DataLoader`` yields a plain list for one batch
    (``[inputs, labels]``). Calling ``backward`` once per part instead perturbs each part separately (m-sharpness with
    m = the size of a part).

    Example:
        >>> parts = MicroBatches([(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(4, 3), torch.zeros(4))])
        >>> [batch_size(part) for part in parts]
        [2, 4]
    """

    __slots__ = ()

    def __new__(cls, batches: Iterable[Any]) -> MicroBatches:
        """Takes any iterable of batches."""
        if isinstance(batches, Mapping):
            names = ", ".join(map(str, batches))
            raise TypeError(
                f"MicroBatches got one mapping (with {names}), but takes several batches: MicroBatches([first, "
                "second]); pass a single batch to backward(model, batch, objective) as it is"
            )
        parts = tuple(batches)
        if not parts:
            raise ValueError("MicroBatches got no batch: pass at least one")
        return super().__new__(cls, parts)


def tensors(batch: Any) -> list[Tensor]:
    """All tensors in nested mappings, lists and tuples."""
    if isinstance(batch, Tensor):
        return [batch]
    values = batch if isinstance(batch, (list, tuple)) else batch.values() if isinstance(batch, Mapping) else ()
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        else:
            found += tensors(value)
    return found


def batch_size(batch: Any) -> int | None:
    """Number of instances: the first dimension of ``labels`` if present, else of the first tensor; or None."""
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor) and batch["labels"].ndim:
        return int(batch["labels"].shape[0])
    return next((int(tensor.shape[0]) for tensor in tensors(batch) if tensor.ndim), None)


def portion(share: float, size: int) -> int:
    """The ceiling of ``share * size``, corrected for rounding errors of the product (0.55 * 100 > 55)."""
    return math.ceil(share * size * (1 - 1e-12))


def take(batch: Any, index: Tensor, size: int) -> Any:
    """The instances ``index`` of a batch of ``size``.

    Tensors and lists of texts of that length are indexed, everything else is kept.

    Example:
        >>> take({"x": torch.arange(4), "scale": torch.tensor(2.0)}, torch.tensor([0, 3]), 4)
        {'x': tensor([0, 3]), 'scale': tensor(2.)}
    """

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size:
            return leaf.index_select(0, index.to(leaf.device))
        if are_texts(leaf) and len(leaf) == size:
            return type(leaf)(leaf[i] for i in index.tolist())
        return leaf

    return tree_map(pick, batch)


def cut(batch: Any, most: int, size: int) -> list[Any]:
    """A batch of ``size`` instances in parts of at most ``most``, as views; what has no instances is in every part.

    Example:
        >>> cut({"x": torch.arange(3), "scale": torch.tensor(2.0)}, 2, 3)
        [{'x': tensor([0, 1]), 'scale': tensor(2.)}, {'x': tensor([2]), 'scale': tensor(2.)}]
    """

    def piece(leaf: Any, start: int) -> Any:
        has_rows = (isinstance(leaf, Tensor) and leaf.ndim > 0) or are_texts(leaf)
        return leaf[start : start + most] if has_rows and len(leaf) == size else leaf

    return [tree_map(partial(piece, start=start), batch) for start in range(0, size, most)]


def obstacle_to_cut(batch: Any, size: int) -> str | None:
    """What prevents a batch of ``size`` instances from being cut: entries that do not have one row per instance.

    A tensor of another length may be shared, or hold the images of all texts. A list with one number, object or
    mapping per instance is not cut, unlike one of texts. Not recognised: a tensor that has this length by chance.

    Example:
        >>> obstacle_to_cut({"x": torch.zeros(4, 2), "images": torch.zeros(5, 3)}, 4)
        'a tensor of shape (5, 3)'
    """
    for tensor in tensors(batch):
        if tensor.ndim and tensor.shape[0] not in (1, size):
            return f"a tensor of shape {tuple(tensor.shape)}"
    return f"a list of {size} entries that are not tensors" if _has_list(batch, size) else None


def _has_list(batch: Any, size: int) -> bool:
    """Whether there is a list with one entry per instance inside the batch, which itself may be a pair."""
    if isinstance(batch, Mapping):
        values = list(batch.values())
    elif isinstance(batch, (list, tuple)) and not are_texts(batch):
        values = list(batch)
    else:
        return False
    return any(_is_list(value, size) or _has_list(value, size) for value in values)


def _is_list(value: Any, size: int) -> bool:
    is_one = isinstance(value, (list, tuple)) and len(value) == size and not are_texts(value)
    return is_one and not any(isinstance(each, (Tensor, list, tuple)) for each in value)


def repeat(batch: Any, times: int, size: int) -> Any:
    """The batch, repeated ``times`` times: (x_1..x_N, x_1..x_N, ...)."""

    def double(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size:
            return torch.cat([leaf] * times)
        return leaf * times if are_texts(leaf) and len(leaf) == size else leaf

    return tree_map(double, batch)


def shares(counts: list[Any]) -> list[Any]:
    """Each count over their sum. Raises a ValueError if one of them is unknown (None)."""
    if any(count is None for count in counts):
        raise ValueError("MicroBatches without tensors: give the objective a method items(batch) that counts")
    total = sum(counts)
    return [ratio(count, total) for count in counts]


def ratio(part: Any, whole: Any) -> Any:
    """The ratio of two counts, in float64 if the device has it; for tensors 0 / 0 is 0."""
    if not isinstance(part, Tensor):
        return part / whole
    wide = torch.float32 if part.device.type == "mps" else torch.float64  # an integer over another would be float32
    return (part.to(wide) / (whole.to(part.device) if isinstance(whole, Tensor) else whole)).nan_to_num(0.0)


def one_more(batch: Any) -> Any:
    """The batch for another pass: a copy of the mapping or list, from which an objective may pop the labels."""
    return (
        batch if isinstance(batch, (Tensor, tuple)) or not isinstance(batch, (MutableMapping, list)) else copy(batch)
    )


def versions(batch: Any) -> list[int]:
    """The versions of the tensors of a batch, which change when a tensor is changed in place."""
    return [version_of(tensor) for tensor in tensors(batch) if not tensor.is_inference()]


def tree_map(function: Callable[[Any], Any], batch: Any) -> Any:
    """Applies a function to every leaf of nested mappings, lists and tuples; mappings come back as plain dicts.

    A list of texts is a leaf.
    """
    if isinstance(batch, Mapping):
        return {key: tree_map(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(tree_map(function, value) for value in batch))
    if isinstance(batch, (list, tuple)) and not are_texts(batch):
        return type(batch)(tree_map(function, value) for value in batch)
    return function(batch)


def are_texts(value: Any) -> bool:
    """Whether this is a list of strings, as a ``DataLoader`` makes from the texts of a batch."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(text, str) for text in value)


_in_a_part = False


@contextmanager
def part_of_a_step(is_one: bool = True) -> Iterator[None]:
    """Inside, objectives are called with a part of a batch, which may have no target, unlike a whole batch.

    This is global state and not an argument, because objectives are arbitrary callables that wrap each other. A
    context inside a part is in the part, too.
    """
    global _in_a_part  # noqa: PLW0603
    before, _in_a_part = _in_a_part, _in_a_part or is_one
    try:
        yield
    finally:
        _in_a_part = before


def is_part_of_a_step() -> bool:
    """Whether objectives are called with a part of a batch at the moment."""
    return _in_a_part
