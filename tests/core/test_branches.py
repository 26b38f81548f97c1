"""Where nothing is recorded, a branch is what stands in its place; w - eps beside w + eps leaves the latter alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from deltasam import DeltaSAM
from deltasam.branches import Branches, is_recorded
from deltasam.perturb import _beside, _in_place
from deltasam.weighting import FiniteDifference


def test_nothing_is_recorded_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    branches, seen = Branches(cpu), []
    with branches.aside([torch.ones(2)]):
        seen.append(torch.is_autocast_cache_enabled())
    branches.join()
    assert seen == [True]
    assert not is_recorded(cpu)


def test_both_sides_of_w_lie_beside_each_other() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 3))
    w, r, step = p.detach().clone(), torch.randn(5, 3), torch.tensor(0.3)
    with _beside([p], [r.clone()], step) as moved:
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


def test_several_draws_hold_the_weights_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched aside keeps its copy of the weights until the join: two of a draw, however many draws."""
    open_, most = [0], []

    @contextmanager
    def aside(self: Branches, reads: Any) -> Iterator[None]:
        open_[0] += 1
        most.append(open_[0])
        yield

    monkeypatch.setattr(Branches, "aside", aside)
    monkeypatch.setattr(Branches, "join", lambda self: open_.__setitem__(0, 0))
    method = DeltaSAM(weighting=FiniteDifference(samples=3))
    method.backward(nn.Linear(2, 1), torch.rand(4, 2), lambda m, x: m(x).squeeze(-1) ** 2)
    assert most == [1, 2] * 3
    assert open_ == [0]
