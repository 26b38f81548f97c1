"""Python's stream is read and restored only where it has moved, and always exactly."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import ERM, SAM
from deltasam.step.python_stream import read

DRAWS: dict[str, Callable[[], Any]] = {
    "one": random.random,
    "all words": lambda: [random.random() for _ in range(312)],  # the place in the words is the same afterwards
    "one normal": lambda: random.gauss(0, 1),
    "two normal": lambda: [random.gauss(0, 1) for _ in range(2)],
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    before, restore = random.getstate(), random.setstate
    random.seed(5)
    yield
    restore(before)


@pytest.mark.parametrize("kept", [0, 1], ids=["", "a normal number is kept"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_it_is_restored(draw: Callable[[], Any], kept: int) -> None:
    for _ in range(kept):
        random.gauss(0, 1)
    start = read()
    assert start.memory is not None
    first = draw()
    assert not start.is_current()
    assert read(start) is not start
    start.restore()
    assert draw() == first
    start.restore()
    assert random.getstate() == start.state


def test_a_stream_that_has_not_moved_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start = read()
    monkeypatch.setattr(random.Random, "getstate", None)
    monkeypatch.setattr(random.Random, "setstate", None)
    assert read(start) is start
    monkeypatch.setattr(random, "setstate", None)
    start.restore()


@pytest.mark.parametrize("kind", ["another class", "a function"])
def test_another_generator_is_read_and_restored(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    other = type("Other", (random.Random,), {})(3)
    for name in ("getstate", "setstate"):
        method = getattr(other, name)
        monkeypatch.setattr(random, name, method if kind == "another class" else lambda *args, f=method: f(*args))
    start = read()
    assert start.memory is None
    first = other.random()
    start.restore()
    assert other.random() == first


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_a_model_that_starts_to_draw(draw: Callable[[], Any]) -> None:
    """In the first step in which it draws, and in the next ones: all passes draw the same, as plain training does."""
    model, drawn = nn.Linear(3, 1), []
    is_drawing = False

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        if is_drawing:
            drawn.append(draw())
        return model(x).squeeze(-1) ** 2

    for _ in range(3):
        SAM().backward(model, torch.ones(2, 3), objective)
    is_drawing = True
    start = random.getstate()
    for _ in range(3):
        ERM().backward(model, torch.ones(2, 3), objective)
    plain, after = drawn.copy(), random.getstate()
    random.setstate(start)
    drawn.clear()
    for _ in range(3):
        SAM().backward(model, torch.ones(2, 3), objective)
    assert drawn[::2] == drawn[1::2] == plain
    assert random.getstate() == after
