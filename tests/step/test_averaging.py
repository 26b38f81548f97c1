"""Averages of the weights against loops over the iterates in float64, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from deltasam import WeightAverage


def model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)


def moved(net: nn.Module, average: WeightAverage, steps: int = 8) -> list[dict[str, Tensor]]:
    """Random updates of the trained weights; returns the weights after each."""
    seen = []
    for _ in range(steps):
        with torch.no_grad():
            for p in net.parameters():
                if p.requires_grad:
                    p.add_(torch.randn_like(p))
        average.update(net)
        seen.append({name: p.detach().clone() for name, p in net.named_parameters()})
    return seen


def exponential(seen: list[Tensor], decay: float) -> Tensor:
    found = seen[0]
    for n, value in enumerate(seen[1:], start=1):
        d = min(decay, (1 + n) / (10 + n))
        found = d * found + (1 - d) * value
    return found


CASES: dict[str, tuple[WeightAverage, Callable[[list[Tensor]], Tensor]]] = {
    "ema": (WeightAverage(decay=0.3), lambda w: exponential(w, 0.3)),
    "ema-warming-up": (WeightAverage(decay=0.999), lambda w: exponential(w, 0.999)),
    "ema-every-2-from-half": (
        WeightAverage(decay=0.3, start=0.5, every=2, total_steps=8),
        lambda w: exponential(w[5::2], 0.3),
    ),
    "swa": (WeightAverage(kind="swa", total_steps=8), lambda w: torch.stack(w[6:]).mean(0)),
    "swa-all": (WeightAverage(kind="swa", start=0.0), lambda w: torch.stack(w).mean(0)),
    "swa-every-3": (WeightAverage(kind="swa", start=0.25, every=3, total_steps=8), lambda w: (w[4] + w[7]) / 2),
}


@pytest.mark.parametrize("name", CASES)
def test_the_average_is_that_of_a_loop(name: str) -> None:
    average, expected = CASES[name]
    net = model()
    seen = moved(net, average)
    with average.applied(net):
        for key, p in net.named_parameters():
            torch.testing.assert_close(p.detach(), expected([w[key] for w in seen]), rtol=1e-12, atol=1e-12)


def test_the_weights_return_whatever_happens_inside() -> None:
    net, average = model(torch.float32), WeightAverage(decay=0.9)
    last = moved(net, average)[-1]
    with suppress(KeyError), average.applied(net):
        assert not torch.equal(net[0].weight, last["0.weight"])
        raise KeyError
    assert all(torch.equal(p, last[name]) for name, p in net.named_parameters())
    average.copy_to(net)
    assert not torch.equal(net[0].weight, last["0.weight"])


def test_frozen_weights_and_buffers_take_no_part() -> None:
    net, average = model(), WeightAverage(kind="swa", start=0.0)
    net[0].requires_grad_(False)
    moved(net, average)
    assert set(average.state_dict()["averages"]) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    net[1].running_mean.fill_(7)
    frozen = net[0].weight.clone()
    average.copy_to(net)
    assert torch.equal(net[0].weight, frozen)
    assert bool((net[1].running_mean == 7).all())


def test_bfloat16_weights_have_a_float32_average() -> None:
    """In bfloat16 the last updates, a thousandth of the difference each, would be rounded away."""
    net, average = nn.Linear(1, 1, bias=False).to(torch.bfloat16), WeightAverage(kind="swa", start=0.0)
    for value in [1.0] * 999 + [2.0]:
        net.weight.data.fill_(value)
        average.update(net)
    assert average.state_dict()["averages"]["weight"].item() == pytest.approx(1.001, abs=1e-5)
    with average.applied(net):
        assert net.weight.dtype == torch.bfloat16


def test_before_the_start_the_weights_are_the_trained_ones() -> None:
    net, average = model(), WeightAverage(kind="swa", start=0.5, total_steps=8)
    last = moved(net, average, steps=4)[-1]
    assert average.count == 0
    with average.applied(net):
        assert torch.equal(net[0].weight, last["0.weight"])
    moved(net, average, steps=1)
    assert average.count == 1


def test_a_restored_average_continues() -> None:
    whole, cut = (WeightAverage(kind="swa", start=0.25, total_steps=8) for _ in range(2))
    net = model()
    moved(net, whole, 5)
    cut.load_state_dict(whole.state_dict())
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    for average in (whole, cut):
        torch.manual_seed(3)
        net.load_state_dict({**net.state_dict(), **start})
        moved(net, average, 3)
    one, other = (average.state_dict() for average in (whole, cut))
    assert one["count"] == other["count"] == 6
    assert all(torch.equal(one["averages"][name], other["averages"][name]) for name in one["averages"])
    with pytest.raises(ValueError, match=r"kind='ema', but the state is that of kind='swa'"):
        WeightAverage().load_state_dict(one)


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, pytest.param(torch.compile, marks=pytest.mark.slow)], ids=["parallel", "compiled"]
)
def test_a_wrapped_model_has_the_names_of_the_model_inside(wrap: Callable[[nn.Module], nn.Module]) -> None:
    net, average = model(), WeightAverage()
    average.update(wrap(net))
    average.update(net)
    assert average.count == 2
    assert "0.weight" in average.state_dict()["averages"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mean"}, r"kind='mean' must be one of \['ema', 'swa'\]"),
        ({"decay": 1.0}, r"decay=1.0 must be in \[0, 1\)"),
        ({"start": 1.5}, r"start=1.5 must be in \[0, 1\), a share"),
        ({"every": 0}, "every=0 must be a whole number"),
        ({"total_steps": 0}, "total_steps=0"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightAverage(**options)  # type: ignore[arg-type]


def test_wrong_use() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"start=0.75 is a share of the training: set total_steps"):
        WeightAverage(kind="swa").update(net)
    average = WeightAverage()
    average.update(net)
    net[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"'0.bias' is trained now and was not averaged so far, or the reverse"):
        average.update(net)
    with pytest.raises(ValueError, match="nothing to average"):
        average.update(net.requires_grad_(False))
