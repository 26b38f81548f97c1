"""From a batch to a call of the model: finds the inputs, the labels and the logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from deltasam._torch import COMPILED_CHILD

Labels = str | Callable[[Any], Tensor]
"""A key of the batch, or a callable that returns the labels of a batch."""

Predict = Callable[[nn.Module, Any], Any]
"""A user's function from the model and the whole batch to the outputs: ``predict(model, batch)``."""


def is_pair(batch: Any) -> bool:
    """Whether the batch has the form ``(inputs, labels)`` of a plain data loader."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def labels_of(batch: Any, labels: Labels, owner: str) -> Tensor:
    """The labels of a batch: ``batch[labels]``, the second of a pair, or what the callable ``labels`` returns."""
    if callable(labels):
        found = labels(batch)
    elif isinstance(batch, Mapping):
        if labels not in batch:
            raise ValueError(
                f"{owner}: the batch has no key {labels!r}, only {sorted(map(str, batch))}; "
                f"name the key that holds the labels: {owner}(labels=...)"
            )
        found = batch[labels]
    elif is_pair(batch):
        found = batch[1]
    else:
        raise ValueError(
            f"{owner}: batch is {describe(batch)}, but must be a mapping with the key {labels!r} or a pair "
            f"(inputs, labels); for any other form pass two callables, {owner}(predict=..., labels=...)"
        )
    if not isinstance(found, Tensor):
        raise ValueError(f"{owner}: labels must be a tensor, but are {describe(found)}")
    return found


def inputs_of(batch: Any, labels: Labels, owner: str) -> Any:
    """The batch without its labels: with them the model would compute its own loss."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != labels}
    if is_pair(batch):
        return batch[0]
    raise ValueError(
        f"{owner}: batch is {describe(batch)}, but must be a mapping or a pair (inputs, labels); "
        f"for any other form pass {owner}(predict=...), a callable predict(model, batch) -> outputs"
    )


def call(model: nn.Module, inputs: Any) -> Any:
    """Calls the model: a mapping by keywords, a tuple or list by position, anything else as the one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def tensor_of(outputs: Any, name: str, owner: str) -> Tensor:
    """The tensor in a model's outputs: the outputs themselves, their field ``name``, or the first of a tuple."""
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get(name)
    elif hasattr(outputs, name):
        found = getattr(outputs, name)
    elif isinstance(outputs, (tuple, list)) and outputs:
        found = outputs[0]
    if not isinstance(found, Tensor):
        raise TypeError(
            f"{owner}: the model returned {describe(outputs)}, which contains no tensor {name!r}; "
            f"pass {owner}(predict=...), a callable predict(model, batch) -> tensor"
        )
    return found


def unwrapped(model: nn.Module) -> Any:
    """The module inside the wrappers of torch.compile and of data parallelism; for inspection only, do not call it."""
    inner: Any = model
    while True:
        modules = dict(inner.named_children())
        for name in (COMPILED_CHILD, "module"):
            # Only a wrapper has a single child of this name.
            if len(modules) == 1 and name in modules:
                inner = modules[name]
                break
        else:
            return inner


def without_cache(model: nn.Module, inputs: Any) -> Any:
    """Adds ``use_cache=False`` for a model that would otherwise fill a key-value cache, because it gets no labels."""
    if not isinstance(inputs, Mapping) or "use_cache" in inputs:
        return inputs
    inner = unwrapped(model)
    if hasattr(inner, "get_base_model"):  # PEFT's adapters pass their arguments on
        inner = inner.get_base_model()
    caches = getattr(getattr(inner, "config", None), "use_cache", False)
    if caches and "use_cache" in inspect.signature(inner.forward).parameters:
        return {**inputs, "use_cache": False}
    return inputs


def describe(value: Any) -> str:
    """A value for an error message: its type, and its shape, length or keys."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {sorted(map(str, value))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"
