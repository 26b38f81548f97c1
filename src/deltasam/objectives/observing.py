"""Lets a caller see the outputs of the model in the pass at w of a step, without another forward.

A trainer logs the entropy or the rewards of the batch. A step calls the objective several times, also at perturbed
weights and with parts of the batch; only the first call with the whole batch counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from deltasam.step.batches import tensors

Observer = Callable[..., None]
"""Called as ``observer(objective, outputs, first=..., **values)``, without a graph."""

_current: _Observation | None = None


class _Observation:
    """The batches of the current step that have not been seen yet."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._expected: list[Tensor] = []
        self._seen_some = False

    def expect(self, batch: Any) -> None:
        """A step over this batch begins; it may have several micro-batches."""
        if self._seen_some:  # another step: a recording that failed is repeated as an ordinary step
            self._expected, self._seen_some = [], False
        first = next(iter(tensors(batch)), None)
        if first is not None and all(each is not first for each in self._expected):
            self._expected.append(first)

    def see(self, objective: Any, outputs: Tensor, batch: Any, values: dict[str, Any]) -> None:
        """The losses of this batch are computed."""
        first = next(iter(tensors(batch)), None)
        others = [each for each in self._expected if each is not first]
        if len(others) == len(self._expected):
            return
        self._expected = others
        is_first, self._seen_some = not self._seen_some, True
        values = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
        self._observer(objective, outputs.detach(), first=is_first, **values)


@contextmanager
def observed_outputs(observer: Observer) -> Iterator[None]:
    """Inside, ``observer`` is called once for every micro-batch of a step, in the first pass over it.

    Args:
        observer: ``observer(objective, outputs, first=..., **values)``: the innermost objective, the outputs of the
            model (logits), and what the objective reports with them. ``first`` is True for the first micro-batch. It
            must not change the outputs, draw random numbers, or synchronise with the device.
    """
    global _current  # noqa: PLW0603 - objectives are arbitrary callables that wrap each other
    before, _current = _current, _Observation(observer)
    try:
        yield
    finally:
        _current = before


def expect(batch: Any) -> None:
    """Called by an objective at the start of a step over ``batch``."""
    if _current is not None:
        _current.expect(batch)


def see(objective: Any, outputs: Tensor, batch: Any, **values: Any) -> None:
    """Called by an objective when it computes losses from outputs."""
    if _current is not None and type(outputs) is Tensor:
        _current.see(objective, outputs, batch, values)
