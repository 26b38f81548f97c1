"""Extra and repeated passes have no side effects on random streams and buffers."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.step.passes import Passes
from deltasam.step.randomness import RandomState, Replay, Seed


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that no other thread is alive; ``test_draws.py`` tests the other case."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1) ** 2


class Counting(nn.Module):
    """Counts its calls, in place or with a new tensor, and fills a buffer that is None at first."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 3, batch_first=True)  # the low-rank engine falls back to the loop here
        self.out = nn.Linear(3, 1)
        self.in_place = in_place
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        if self.cache is None:
            self.cache = self.out.weight.detach().clone()
        return self.out(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize("method", [SAM(), PerInstanceSAM(engine="loop"), PerInstanceSAM()], ids=str)
@pytest.mark.filterwarnings("ignore:.*one after the other")
def test_a_restarted_step_counts_once(method: Method) -> None:
    for in_place in (True, False):
        model = Counting(in_place)
        for _ in range(2):
            method.backward(model, torch.randn(4, 5, 3), objective)
        assert float(model.calls) == 2


@pytest.mark.parametrize("method", [SAM(), DeltaSAM(rho=0.5)], ids=str)
def test_a_buffer_that_is_filled_in_a_pass_has_the_value_at_w(method: Method) -> None:
    model = Counting()
    method.backward(model, torch.randn(4, 5, 3), objective)
    assert torch.equal(model.cache, model.out.weight)


def test_rewinding_restores_values_and_tensors() -> None:
    for in_place in (True, False):
        model = Counting(in_place)
        own = model.calls
        replay = Replay(model, ())
        torch.manual_seed(4)
        model(torch.randn(4, 5, 3))
        assert float(model.calls) == 1
        replay.rewind()
        assert model.calls is own
        assert float(model.calls) == 0
        assert model.cache is None


def test_parts_that_are_probed_one_by_one_see_the_draws_of_the_sweep_at_w() -> None:
    """Masks and buffers of the second part continue those of the first, even if both are probed separately."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 1))
    model.register_buffer("calls", torch.zeros(()))
    x, seen = torch.randn(8, 6), []

    def counted(model: nn.Module, x: Tensor) -> Tensor:
        model.calls += 1
        losses = objective(model, x)
        seen.append((float(model.calls), losses.detach().clone()))
        return losses

    passes = Passes(model, (parts := _parts(x)), counted)
    before = torch.get_rng_state()
    for part in passes.parts(without_side_effects=True):
        part.losses()
        part.losses()
    assert torch.equal(torch.get_rng_state(), before)
    assert float(model.calls) == 0
    passes.gradient()
    assert len(seen) == 3 * len(parts)
    for probed, again, trained in zip(seen[0:6:2], seen[1:6:2], seen[6:], strict=True):
        assert probed[0] == again[0] == trained[0]
        assert torch.equal(probed[1], trained[1])
        assert torch.equal(again[1], trained[1])


def _parts(x: Tensor):
    from deltasam import MicroBatches

    return MicroBatches([x[:3], x[3:6], x[6:]])


def test_seeds_below_zero_differ() -> None:
    """In Python hash(-1) == hash(-2)."""
    values = [
        Seed(user, step, path).value for user in range(-4, 3) for step in (0, 1) for path in ((), (0,), (-1,), (-2,))
    ]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 2**63 for value in values)


def test_other_seeds_are_unchanged() -> None:
    for parts in ((0, 0), (7, 3), (-2, 5), (3, 1, 4, 1)):
        assert Seed(parts[0], parts[1], parts[2:]).value == hash(parts) & (2**63 - 1)


def _draws() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 - what a model may draw from


def test_independent_passes_draw_from_separate_streams_and_consume_nothing() -> None:
    """Python, NumPy, torch: the draws differ from those at w and between passes, and can be repeated."""
    before, found = RandomState.now(()), []
    for replay in [Replay(nn.Identity(), (), "independent") for _ in range(2)]:
        for _ in range(2):
            with replay.extra():
                found.append(_draws())
    assert before.agrees_on_the_host(RandomState.now(()))
    assert found[:2] == found[2:]
    for first, second, at_w in zip(*found[:2], _draws(), strict=True):
        assert len({first, second, at_w}) == 3


def test_shared_passes_repeat_the_draws_of_the_pass_at_w() -> None:
    replay, found = Replay(nn.Identity(), ()), []
    for _ in range(2):
        with replay.extra():
            found.append(_draws())
    assert found == [_draws()] * 2


class Sharing(nn.Module):
    """Two modules with one buffer: the first counts in it, the second reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Module(), nn.Module()
        self.first.register_buffer("calls", torch.zeros(()))
        self.second.register_buffer("calls", self.first.calls)

    def forward(self) -> float:
        self.first.calls += 1
        return float(self.second.calls)


def test_a_shared_buffer_stays_shared_in_an_extra_pass() -> None:
    model = Sharing()
    replay = Replay(model, ())
    for _ in range(2):
        with replay.extra():
            assert model() == 1
    assert model() == 1
    assert model.first.calls is model.second.calls
