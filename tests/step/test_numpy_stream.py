"""NumPy's stream is read and restored only where it has moved, and always exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import ERM, SAM
from deltasam.step.draws import are_equal
from deltasam.step.numpy_stream import read

DRAWS: dict[str, Callable[[], Any]] = {
    "one": np.random.rand,
    "all words": lambda: np.random.rand(312),  # noqa: NPY002 - the place in the words is the same afterwards
    "one normal": np.random.randn,
    "two normal": lambda: np.random.randn(2),  # noqa: NPY002
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    before, restore = np.random.get_state(), np.random.set_state  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    yield
    restore(before)


@pytest.mark.parametrize("kept", [0, 1], ids=["", "a normal number is kept"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_it_is_restored(draw: Callable[[], Any], kept: int) -> None:
    np.random.randn(kept)  # noqa: NPY002
    start = read()
    assert start is not None
    assert (start.memory is None) == bool(kept)
    first = draw()
    assert not start.is_current()
    assert read(start) is not start
    start.restore()
    assert np.array_equal(draw(), first)
    start.restore()
    assert are_equal(np.random.get_state(), start.state)  # noqa: NPY002


def test_a_stream_that_has_not_moved_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start = read()
    monkeypatch.setattr(np.random, "get_state", None)
    monkeypatch.setattr(np.random, "set_state", None)
    assert read(start) is start
    assert start is not None
    start.restore()


def test_another_generator_is_read_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    other = np.random.MT19937(3)
    monkeypatch.setattr(np.random, "get_bit_generator", lambda: other)
    state = read()
    assert state is not None
    assert state.memory is None


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_a_model_that_starts_to_draw(draw: Callable[[], Any]) -> None:
    """In the first step in which it draws, and in the next ones: all passes draw the same, as plain training does."""
    model, drawn = nn.Linear(3, 1), []
    is_drawing = False

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        if is_drawing:
            drawn.append(float(np.sum(draw())))
        return model(x).squeeze(-1) ** 2

    for _ in range(3):
        SAM().backward(model, torch.ones(2, 3), objective)
    is_drawing = True
    start = np.random.get_state()  # noqa: NPY002
    for _ in range(3):
        ERM().backward(model, torch.ones(2, 3), objective)
    plain, after = drawn.copy(), np.random.get_state()  # noqa: NPY002
    np.random.set_state(start)  # noqa: NPY002
    drawn.clear()
    for _ in range(3):
        SAM().backward(model, torch.ones(2, 3), objective)
    assert drawn[::2] == drawn[1::2] == plain
    assert are_equal(np.random.get_state(), after)  # noqa: NPY002
