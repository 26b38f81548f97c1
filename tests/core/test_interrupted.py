"""An interruption (Ctrl-C, a signal handler that raises) may come at any line, also while things are put back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deltasam
from deltasam.instances import record
from deltasam.perturb import perturbed
from deltasam.randomness import Buffers

ROOT = str(deltasam.__path__[0])


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.eval()


def places(model: nn.Module) -> list[Any]:
    """Whatever a pass may be lent in the place of the model's own."""
    own: list[Any] = [(type(p), p.data_ptr()) for p in model.parameters()]
    return own + [b.data_ptr() for b in model.buffers()]


def moved(model: nn.Module) -> AbstractContextManager[Any]:
    params = list(model.parameters())
    return perturbed(params, [torch.ones_like(p) for p in params], torch.tensor(0.1))


def rewound(model: nn.Module) -> AbstractContextManager[Any]:
    return Buffers(model).rewound()


def instances(model: nn.Module) -> AbstractContextManager[Any]:
    def run() -> Tensor:
        losses: Tensor = model(torch.ones(2, 3)).square().sum(-1)
        return losses

    return record(model, run, size=2).perturbed(torch.ones(2))


@pytest.mark.parametrize("lend", [moved, rewound, instances])
def test_nothing_is_ever_put_back_by_halves(lend: Callable[[nn.Module], AbstractContextManager[Any]]) -> None:
    model = Net()
    own = places(model)
    context = lend(model)
    seen: list[int] = []

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "line":  # where an interruption would be raised
            sys.settrace(None)
            seen.append(sum(a != b for a, b in zip(own, places(model), strict=True)))
            sys.settrace(trace)
        return trace

    with context:
        away = sum(a != b for a, b in zip(own, places(model), strict=True))
        sys.settrace(trace)
    sys.settrace(None)
    assert away > 1
    assert away in seen
    assert set(seen) <= {away, 0}
    assert places(model) == own
