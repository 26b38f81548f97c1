"""Branches without a recording run in order; a recorded w - eps is a second copy and does not overwrite w + eps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from deltasam import DeltaSAM
from deltasam.step.branches import Branches, is_recorded, main_memory
from deltasam.step.moving import _in_place, _lending, _recorded
from deltasam.weighting import FiniteDifference


def test_nothing_is_recorded_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    branches, seen = Branches(cpu), []
    with branches.concurrent([torch.ones(2)]):
        seen.append(torch.is_autocast_cache_enabled())
    branches.join()
    assert seen == [True]
    assert not is_recorded(cpu)


def test_a_recorded_move_keeps_both_sides_of_w() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 3))
    w, r, step = p.detach().clone(), torch.randn(5, 3), torch.tensor(0.3)
    with _recorded([p], [r.clone()], step) as moved:
        plus = p.data
        value = plus.clone()
        moved.mirror()
        minus = p.data
        assert torch.equal(plus, value)
        assert plus.data_ptr() != minus.data_ptr()
    assert torch.equal(p, w)
    with _in_place([p], [r.clone()], step) as moved:
        assert torch.equal(p, plus)
        moved.mirror()
        assert torch.equal(p, minus)
    assert torch.equal(p, w)


def test_nothing_is_prepared_aside_on_a_cpu() -> None:
    branches, r = Branches(torch.device("cpu")), torch.ones(2)
    with branches.prepare(), main_memory(torch.device("cpu")):
        branches.keep([r])
    branches.join()
    assert branches._kept == []


def test_several_draws_need_the_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A concurrent pass keeps its copy of the weights until the join: two copies per draw, freed before the next."""
    open_, most = [0], []

    @contextmanager
    def aside(self: Branches, reads: Any) -> Iterator[None]:
        open_[0] += 1
        most.append(open_[0])
        yield

    monkeypatch.setattr(Branches, "concurrent", aside)
    monkeypatch.setattr(Branches, "join", lambda self: open_.__setitem__(0, 0))
    method = DeltaSAM(weighting=FiniteDifference(samples=3))
    method.backward(nn.Linear(2, 1), torch.rand(4, 2), lambda m, x: m(x).squeeze(-1) ** 2)
    assert most == [1, 2] * 3
    assert open_ == [0]


@pytest.mark.parametrize("way", [_lending, _in_place, _recorded])
def test_every_way_of_moving_restores_the_weights_and_clears_the_autocast_cache(way: Any) -> None:
    """On a GPU weights move in place, so a test of the way of the CPU does not cover it."""
    model, x = nn.Linear(8, 2), torch.randn(4, 8)
    before = [p.detach().clone() for p in model.parameters()]
    moved = [p + 1000 for p in before]  # large enough that w is lost in rounding
    wanted = [nn.functional.linear(x.bfloat16(), *(v.bfloat16() for v in at)) for at in (before, moved)]
    seen = []

    def fail() -> None:
        with way(list(model.parameters()), [torch.ones_like(p) for p in before], torch.tensor(1000.0)):
            seen.append(model(x))
            raise RuntimeError("in the middle")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen.append(model(x))
        with pytest.raises(RuntimeError, match="in the middle"):
            fail()
        seen.append(model(x))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True))
    for found, k in zip(seen, (0, 1, 0), strict=True):  # at w and at w + eps the outputs are thousands apart
        torch.testing.assert_close(found, wanted[k], rtol=0.02, atol=0.02)
