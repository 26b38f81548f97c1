"""Gradients for the ascent, which do not touch ``.grad``; and ``.grad`` set aside, so that a method can modify it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, repeat, starmap
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from deltasam._torch import version_of, with_gradient_hooks


class Scaler(Protocol):
    """The interface of ``torch.amp.GradScaler`` and similar classes."""

    def scale(self, outputs: Tensor) -> Tensor:
        """The loss times the current scale."""


def scaled(value: Tensor, scale: float | Tensor | Scaler) -> Tensor:
    """The value times the loss scale."""
    if isinstance(scale, (int, float)):
        return value if scale == 1 else value * scale
    if isinstance(scale, Tensor):
        return value * scale.to(value.device).reshape(())  # shape (1,) would broadcast to the loss
    return scale.scale(value)


_searched: Any = WeakIdKeyDictionary()  # parameters without a gradient, for which the graph was searched once


class Gradient:
    """The sum of the gradients of several losses with respect to some parameters, without touching ``.grad``.

    Attributes:
        total: One tensor per parameter, None if it was not used.
    """

    def __init__(self, targets: Sequence[nn.Parameter]) -> None:
        self._targets = targets
        self.total: list[Tensor | None] = []

    def add(self, loss: Tensor) -> None:
        """Adds the gradient of one more loss."""
        grads = grad(loss, self._targets, allow_unused=True)
        without = [p for p, found in zip(self._targets, grads, strict=True) if found is None]
        if any(p not in _searched for p in without):
            refuse_reentrant(loss)
            _searched.update(dict.fromkeys(without, True))
        self.total = [added(a, b) for a, b in zip(self.total, grads, strict=True)] if self.total else list(grads)


class ShardedGradient(Gradient):
    """The same for sharded parameters, which are not in the graph: hooks fill their ``.grad``."""

    def add(self, loss: Tensor) -> None:
        """Adds the gradient of one more loss, the mean of those of all processes."""
        loss.backward()  # type: ignore[no-untyped-call]
        self.total = [p.grad for p in self._targets]


class ReentrantError(RuntimeError):
    """Reentrant activation checkpointing hides its parameters from :func:`torch.autograd.grad`."""


def grad(loss: Tensor, inputs: Sequence[Any], **options: Any) -> tuple[Tensor, ...]:
    """:func:`torch.autograd.grad`; raises a ReentrantError if reentrant checkpointing does not allow it."""
    try:
        return torch.autograd.grad(loss, inputs, **options)
    except RuntimeError as error:
        if "checkpoint" in str(error).lower():
            refuse_reentrant(loss)
        raise


def refuse_reentrant(loss: Tensor) -> None:
    """Raises a ReentrantError if the graph of a loss contains a checkpoint with ``use_reentrant=True``."""
    if any(node.name() == "CheckpointFunctionBackward" for node in graph_of(loss)):
        options = "gradient_checkpointing_kwargs={'use_reentrant': False}"
        raise ReentrantError(
            "activation checkpointing with use_reentrant=True hides its parameters from torch.autograd.grad, which "
            f"this method needs; set use_reentrant=False: with a Trainer TrainingArguments({options}), in a plain "
            f"loop model.gradient_checkpointing_enable({options}) or checkpoint(..., use_reentrant=False); since "
            "transformers 5.23 the names begin with activation_checkpointing"
        )


def graph_of(loss: Tensor) -> set[Any]:
    """All nodes of the graph of a loss."""
    return nodes_behind(loss.grad_fn)


def nodes_behind(*starts: Any) -> set[Any]:
    """These nodes of a graph, and all from which they are computed."""
    seen: set[Any] = set()
    left = list(starts)
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left.extend(parent for parent, _ in node.next_functions)
    return seen


def without_steps(trainable: Mapping[str, nn.Parameter]) -> AbstractContextManager[None]:
    """Refuses optimizers that step in a hook of backward, while the weights are moved or the gradient is not final."""
    hooked = with_gradient_hooks(trainable)
    return _unchanged(hooked) if hooked else nullcontext()


@contextmanager
def _unchanged(hooked: Mapping[str, nn.Parameter]) -> Iterator[None]:
    before = {name: (p, version_of(p)) for name, p in hooked.items()}
    yield
    for name, (p, version) in before.items():
        if version_of(p) != version:
            raise RuntimeError(
                f"an optimizer steps in a hook of {name!r} while this method has moved the weights or not yet "
                "finished the gradient: the step would be lost. Remove the hook (register_post_accumulate_grad_hook), "
                "and step after method.backward(); ERM and PerInstanceSAM's low-rank engine, which do not move the "
                "weights, allow such hooks"
            )


def gradient(
    targets: Sequence[nn.Parameter], sharded: Mapping[str, nn.Parameter] | None = None
) -> AbstractContextManager[Gradient]:
    """Collects gradients. Hooks write to ``.grad`` of ``sharded`` parameters, which is restored afterwards."""
    return nullcontext(Gradient(targets)) if sharded is None else _sharded_gradient(targets, sharded)


@contextmanager
def _sharded_gradient(targets: Sequence[nn.Parameter], trainable: Mapping[str, nn.Parameter]) -> Iterator[Gradient]:
    before = {name: p.grad for name, p in trainable.items()}
    try:
        for p in trainable.values():
            p.grad = None
        yield ShardedGradient(targets)
    finally:
        for name, p in trainable.items():
            p.grad = before[name]


@contextmanager
def set_aside(trainable: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Empties ``.grad``, and adds the earlier gradient afterwards; after an exception ``.grad`` is restored."""
    params = list(trainable.values())
    before = [p.grad for p in params]
    back = map(setattr, params, repeat("grad"), before)
    try:
        for p in params:
            p.grad = None
        yield
        # All sums that need memory come before any assignment: a failure must not leave half of them behind.
        pairs = [(earlier, p.grad) for earlier, p in zip(before, params, strict=True)]
        sums = [earlier if _fits(earlier, new) else added(earlier, new) for earlier, new in pairs]
        in_place = starmap(Tensor.add_, [pair for pair in pairs if _fits(*pair)])
        rest = chain(in_place, map(setattr, params, repeat("grad"), sums))
    except BaseException:
        deque(back, maxlen=0)  # one call, here and below: an interruption (Ctrl-C) finds all of it done, or nothing
        raise
    deque(rest, maxlen=0)


def _fits(earlier: Tensor | None, new: Tensor | None) -> bool:
    """Whether the sum can be written into the earlier gradient, so that ``.grad`` keeps its address."""
    return earlier is not None and new is not None and not earlier.is_sparse


def added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum; None is zero."""
    if first is None or second is None:
        return second if first is None else first
    if first.is_sparse and not second.is_sparse:
        first, second = second, first  # torch adds a sparse tensor to a dense one, not the other way round
    return first + second  # not in place: autograd may give two parameters the same tensor
