"""All threads share Python's and NumPy's random streams: those that a model does not use are not touched."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand as numpy_function
from torch import Tensor, nn

from deltasam import MicroBatches
from deltasam.methods import ERM, SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.objectives import Classification
from deltasam.objectives.regularisers import R3F
from deltasam.step.randomness import RandomState, Replay
from deltasam.weighting import Directional, OwnGradient

METHODS: dict[str, Callable[[], Method]] = {
    "sam": SAM,
    "delta-sam": DeltaSAM,
    "directional": lambda: DeltaSAM(weighting=Directional()),
    "own-gradient": lambda: DeltaSAM(weighting=OwnGradient()),
    "low-rank": lambda: PerInstanceSAM(engine="low-rank"),
    "loop": lambda: PerInstanceSAM(engine="loop"),
}
DRAWS: dict[str, Callable[[], float]] = {
    "random.random": random.random,
    "random.randint()": lambda: float(random.randint(1, 2**50)),
    "numpy.random.rand()": lambda: float(np.random.rand()),  # noqa: NPY002
    "from numpy.random import rand": lambda: float(numpy_function()),  # noqa: NPY002
    "numpy.random.sample()": lambda: float(np.random.sample()),  # noqa: NPY002
}
each_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())


@contextmanager
def thread(work: Callable[[], Any]) -> Iterator[None]:
    """Another thread that calls a function repeatedly."""
    done = threading.Event()

    def loop() -> None:
        while not done.is_set():
            work()
            time.sleep(0)

    other = threading.Thread(target=loop)
    other.start()
    try:
        yield
    finally:
        done.set()
        other.join()


def idle() -> AbstractContextManager[None]:
    return thread(lambda: time.sleep(0.001))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def batch() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Drawing:
    """An objective that draws, and keeps its draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw
        self.drawn: list[float] = []

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.drawn.append(self.draw())
        losses: Tensor = model(x).squeeze(-1).square() * (1 + self.drawn[-1] % 1)
        return losses


@pytest.mark.parametrize("randomness", ["shared", "independent"])
@pytest.mark.parametrize("draw", [DRAWS["random.random"], DRAWS["numpy.random.rand()"]], ids=["python", "numpy"])
@each_method
def test_another_thread_never_draws_a_number_twice(
    make: Callable[[], Method], draw: Callable[[], float], randomness: str
) -> None:
    drawn: list[float] = []

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        enough = len(drawn) + 3
        while len(drawn) < enough:  # in every pass of ours
            time.sleep(0)
        losses: Tensor = model(x).squeeze(-1).square()
        return losses

    model, method = net(), make().replace(randomness=randomness)
    with thread(lambda: drawn.append(draw())):
        for _ in range(3):
            method.backward(model, batch(), objective)
        method.backward(model, MicroBatches([batch()[:2], batch()[2:]]), objective)
        model.eval()
        method.backward(model, batch(), objective)
    assert len(drawn) > 30
    assert len(set(drawn)) == len(drawn)


@each_draw
@each_method
def test_passes_share_draws_while_another_thread_is_alive(
    make: Callable[[], Method], draw: Callable[[], float]
) -> None:
    """In every step, including the first; and the step consumes the draws of plain training."""
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    plain, model, objective, method = Drawing(draw), net(), Drawing(draw), make()
    start = RandomState.now(())
    with idle():
        for _ in range(3):
            ERM().backward(model, batch(), plain)
        after = RandomState.now(())
        start.restore()
        for step in range(3):
            objective.drawn.clear()
            method.backward(model, batch(), objective)
            assert len(objective.drawn) > 1
            assert set(objective.drawn) == {plain.drawn[step]}
    assert after.agrees_on_the_host(RandomState.now(()))


@each_draw
@each_method
def test_parts_of_a_batch_share_their_draws(make: Callable[[], Method], draw: Callable[[], float]) -> None:
    plain, objective, model = Drawing(draw), Drawing(draw), net()
    parts = MicroBatches([batch()[:3], batch()[3:]])
    start = RandomState.now(())
    with idle():
        ERM().backward(model, parts, plain)
        after = RandomState.now(())
        start.restore()
        make().backward(model, parts, objective)
    assert set(objective.drawn) == set(plain.drawn)
    assert after.agrees_on_the_host(RandomState.now(()))


@each_draw
def test_independent_passes_draw_other_numbers_and_consume_nothing(draw: Callable[[], float]) -> None:
    plain, objective, model, method = Drawing(draw), Drawing(draw), net(), SAM(randomness="independent")
    start = RandomState.now(())
    with idle():
        for _ in range(2):
            ERM().backward(model, batch(), plain)
        after = RandomState.now(())
        start.restore()
        for _ in range(2):
            method.backward(model, batch(), objective)
    assert objective.drawn[::2] == plain.drawn
    assert not set(objective.drawn[1::2]) & set(plain.drawn)
    assert after.agrees_on_the_host(RandomState.now(()))


@each_draw
@pytest.mark.parametrize("failing", [1, 2], ids=["at w", "extra"])
def test_an_error_restores_streams_profile_and_functions(draw: Callable[[], float], failing: int) -> None:
    own, model, objective, start = dict(vars(np.random)), net(), Drawing(draw), RandomState.now(())
    draw()
    after = RandomState.now(())
    start.restore()

    def raising(model: nn.Module, x: Tensor) -> Tensor:
        losses = objective(model, x)
        if len(objective.drawn) == failing:
            raise KeyboardInterrupt
        return losses

    with idle(), pytest.raises(KeyboardInterrupt):
        SAM().backward(model, batch(), raising)
    assert after.agrees_on_the_host(RandomState.now(()))
    assert sys.getprofile() is None
    assert dict(vars(np.random)) == own


def test_a_profiler_is_not_replaced() -> None:
    """The thread that draws is unknown then, and the streams are replayed."""

    def profile(*_: Any) -> None:
        pass

    objective, model = Drawing(DRAWS["random.random"]), net()
    with idle():
        sys.setprofile(profile)
        try:
            for _ in range(5):
                objective.drawn.clear()
                SAM().backward(model, batch(), objective)
                assert len(set(objective.drawn)) == 1
            assert sys.getprofile() is profile
        finally:
            sys.setprofile(None)


def test_each_mode_is_watched_separately() -> None:
    """A model that draws in training mode only, seen in evaluation mode first."""
    model, drawn = net(), []

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        if model.training:
            drawn.append(random.random())
        losses: Tensor = model(x).squeeze(-1).square()
        return losses

    with idle():
        for training in (False, True, False, True):
            model.train(training)
            SAM().backward(model, batch(), objective)
    assert len(drawn) == 4
    assert len(set(drawn)) == 2


class Words(nn.Module):
    """Classifies tokens; draws a number in every pass."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.embeddings, self.out = nn.Embedding(10, 4), nn.Linear(4, 2)
        self.draw = draw
        self.drawn: list[float] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        self.drawn.append(self.draw())
        logits: Tensor = self.out(self.embeddings(input_ids).mean(1))
        return logits


@each_draw
@pytest.mark.parametrize("method", [ERM(), SAM()], ids=str)
def test_passes_of_a_regulariser_share_their_draws(method: Method, draw: Callable[[], float]) -> None:
    model, objective = Words(draw), R3F(Classification(), masks="shared", embeddings="embeddings")
    words = {"input_ids": torch.arange(6).view(2, 3), "labels": torch.tensor([0, 1])}
    with idle():
        for _ in range(2):
            model.drawn.clear()
            method.backward(model, words, objective)
            assert len(model.drawn) > 1
            assert len(set(model.drawn)) == 1


def test_a_pass_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = []
    monkeypatch.setattr(sys, "setprofile", profiles.append)
    model = net()
    with idle():
        for _ in range(3):
            with Replay(model, ()).extra():
                model(batch())
    assert len([each for each in profiles if each is not None]) == 1
