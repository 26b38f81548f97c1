"""Schedules of the radius: their factors, and what a method does with them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from deltasam import SAM, LossBudget, Scheduled
from deltasam.step.radius import Progress


def factors(rule: Scheduled, total: int = 8, **known: Any) -> list[float]:
    return [round(rule.factor(Progress(step=t, total=total, **known)), 6) for t in range(total)]


def test_factors() -> None:
    assert factors(Scheduled(0.1)) == [1] * 8
    assert factors(Scheduled(0.1, start=0.5)) == [0] * 4 + [1] * 4
    assert factors(Scheduled(0.1, warmup=0.5)) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert factors(Scheduled(0.1, start=2, warmup=4, unit="steps")) == [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(Scheduled(0.1, after="linear", end=0.2)) == [round(0.2 + 0.8 * (1 - t / 8), 6) for t in range(8)]
    cosine = [round((1 + math.cos(math.pi * t / 8)) / 2, 6) for t in range(8)]
    assert factors(Scheduled(0.1, after="cosine")) == cosine
    assert factors(Scheduled(0.1, warmup=1.0, ramp="cosine")) == [
        round((1 - math.cos(math.pi * (t + 1) / 8)) / 2, 6) for t in range(7)
    ] + [1]


def test_epochs() -> None:
    rule = Scheduled(0.1, start=1, unit="epochs")
    assert [rule.factor(Progress(step=t, epoch=t / 4)) for t in (0, 3, 4, 5)] == [0, 0, 1, 1]


def test_the_learning_rate() -> None:
    rule = Scheduled(0.1, after="lr", end=0.2)
    assert rule.factor(Progress(lr=0.5)) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("rule", "missing"),
    [
        (Scheduled(0.1, start=0.5), "total"),
        (Scheduled(0.1, after="cosine"), "total"),
        (Scheduled(0.1, after="lr"), "lr"),
        (Scheduled(0.1, warmup=1, unit="epochs"), "epoch"),
    ],
)
def test_an_error_says_what_is_missing(rule: Scheduled, missing: str) -> None:
    model, x = nn.Linear(2, 1), torch.ones(3, 2)
    with pytest.raises(ValueError, match=rf"set_progress\({missing}"):
        SAM(rho=rule).backward(model, x, lambda model, x: model(x).squeeze(-1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start": 3}, "start=3"),
        ({"unit": "days"}, "unit='days'"),
        ({"after": "half"}, "after='half'"),
        ({"total": 0}, "total=0"),
        ({"rho": -1}, "rho=-1"),
    ],
)
def test_mistakes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scheduled(**options)


def test_a_method_follows_the_schedule_and_its_state_goes_on() -> None:
    """The loss is linear, so that its rise is the budget."""
    torch.manual_seed(0)
    model, x = nn.Linear(2, 1).double(), torch.ones(3, 2).double()

    def run(method: SAM, steps: int) -> list[float]:
        made = [method.backward(model, x, lambda model, x: model(x).squeeze(-1)) for _ in range(steps)]
        return [round(float(step.sharpness), 9) for step in made]

    rule = Scheduled(LossBudget(0.8), start=2, warmup=4, unit="steps")
    wanted = [0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 0.8]
    assert run(SAM(rho=rule), 7) == wanted
    first = SAM(rho=rule)
    assert run(first, 4) == wanted[:4]
    second = SAM(rho=rule)
    second.load_state_dict(first.state_dict())
    assert run(second, 3) == wanted[4:]


def test_progress_from_outside_takes_precedence() -> None:
    model, x = nn.Linear(2, 1), torch.ones(3, 2)
    method = SAM(rho=Scheduled(0.1, start=0.5))
    for step, forwards in ((0, 1), (4, 1), (5, 2), (9, 2)):
        method.set_progress(step=step, total=10)
        assert method.replace().backward(model, x, lambda model, x: model(x).squeeze(-1)).forwards == forwards
