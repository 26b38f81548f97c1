"""Slices of the loss, against direct evaluation; the weights are unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.analysis import (
    adversarial_risk,
    filter_direction,
    gradient_direction,
    instance_slice,
    line_slice,
    plane_slice,
)


@pytest.fixture
def problem() -> tuple[nn.Module, list[dict[str, Tensor]], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3)).double()
    data = [{"x": torch.randn(n, 4).double(), "y": torch.randint(3, (n,))} for n in (5, 3)]

    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    return model, data, objective


def mean_loss(model: nn.Module, data: list[Any], objective: Any, move: list[Tensor | None]) -> float:
    moved = copy.deepcopy(model).eval()
    with torch.no_grad():
        for p, d in zip(moved.parameters(), move, strict=True):
            if d is not None:
                p += d
        return float(torch.cat([objective(moved, batch) for batch in data]).mean())


def scaled(direction: list[Tensor | None], t: float) -> list[Tensor | None]:
    return [None if d is None else t * d for d in direction]


def test_filters_have_the_norm_of_their_weights_and_biases_stay(problem: Any) -> None:
    model, _, _ = problem
    direction = filter_direction(model, seed=3)
    for d, p in zip(direction, model.parameters(), strict=True):
        assert (d is None) == (p.dim() == 1)
        if d is not None:
            torch.testing.assert_close(d.norm(dim=1), p.detach().norm(dim=1))
    again, other = filter_direction(model, seed=3), filter_direction(model, seed=4)
    assert torch.equal(direction[0], again[0])
    assert not torch.equal(direction[0], other[0])


def test_line_and_plane_equal_direct_evaluation(problem: Any) -> None:
    model, data, objective = problem
    before = [p.clone() for p in model.parameters()]
    one, two = filter_direction(model, seed=0), filter_direction(model, seed=1)
    ts = [-0.5, 0.0, 0.7]
    found = line_slice(model, data, objective, one, ts)
    assert found == pytest.approx([mean_loss(model, data, objective, scaled(one, t)) for t in ts])
    plane = plane_slice(model, data, objective, one, two, ts)
    assert plane_slice(model, data, objective, one, two, ts, rows=ts[1:2]) == plane[1:2]
    for row, t in zip(plane, ts, strict=True):
        for value, s in zip(row, ts, strict=True):
            both = [None if a is None else s * a + t * b for a, b in zip(one, two, strict=True)]
            assert value == pytest.approx(mean_loss(model, data, objective, both))
    assert plane[1][1] == pytest.approx(found[1])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_plane_moves_what_only_one_of_its_directions_moves(problem: Any) -> None:
    model, data, objective = problem
    filters, gradient = filter_direction(model, seed=0), gradient_direction(model, data, objective)
    rows = plane_slice(model, data, objective, filters, gradient, [0.0, 1.0])
    assert rows[1][0] == pytest.approx(mean_loss(model, data, objective, gradient))
    both = [b if a is None else a + b for a, b in zip(filters, gradient, strict=True)]
    assert rows[1][1] == pytest.approx(mean_loss(model, data, objective, both))
    turned = plane_slice(model, data, objective, gradient, filters, [0.0, 1.0])
    assert turned[0][1] == pytest.approx(rows[1][0])


def test_sams_direction_is_the_unit_gradient_of_the_mean_loss(problem: Any) -> None:
    model, data, objective = problem
    found = gradient_direction(model, data, objective)
    copied = copy.deepcopy(model).eval()
    torch.cat([objective(copied, batch) for batch in data]).mean().backward()
    wanted = torch.cat([p.grad.flatten() for p in copied.parameters()])
    together = torch.cat([d.flatten() for d in found])
    torch.testing.assert_close(together, wanted / wanted.norm())
    rising = line_slice(model, data, objective, found, [-1e-3, 0.0, 1e-3])
    assert rising[0] < rising[1] < rising[2]


def test_each_instances_direction_is_the_adversarial_risk(problem: Any) -> None:
    model, data, objective = problem
    found = instance_slice(model, data, objective, [0.0, 0.05, 0.1])
    assert found[0] == pytest.approx(mean_loss(model, data, objective, [None] * 4))
    assert found[1] == pytest.approx(adversarial_risk(model, data, objective, rho=0.05).value)
    assert found[0] < found[1] < found[2]
    with pytest.raises(ValueError, match="at least 0"):
        instance_slice(model, data, objective, [-0.1, 0.1])


def test_a_flat_loss_has_no_direction(problem: Any) -> None:
    model, data, _ = problem
    with pytest.raises(ValueError, match="norm 0"):
        gradient_direction(model, data, lambda model, batch: 0 * model(batch["x"]).sum(dim=1))


def test_a_mean_in_place_of_losses_is_refused(problem: Any) -> None:
    model, data, objective = problem

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return objective(model, batch).mean()

    with pytest.raises(ValueError, match="reduction='none'"):
        line_slice(model, data, mean, filter_direction(model), [0.0, 0.1])
    with pytest.raises(ValueError, match="reduction='none'"):
        gradient_direction(model, data, mean)


def test_no_distances_are_an_empty_slice(problem: Any) -> None:
    assert instance_slice(*problem, distances=[]) == []


def test_the_direction_of_many_batches_in_bfloat16() -> None:
    """A sum in bfloat16 does not grow any more when it is 256 times as large as its terms."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).bfloat16()
    data = [torch.randn(4, 3).bfloat16() + 0.5 for _ in range(1000)]

    def objective(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).squeeze(-1).float()

    wanted = torch.cat([torch.stack([x.double().sum(0) for x in data]).sum(0), torch.tensor([4000.0])])
    found = gradient_direction(model, data, objective)
    assert {part.dtype for part in found if part is not None} == {torch.bfloat16}
    direction = torch.cat([part.flatten().double() for part in found if part is not None])
    torch.testing.assert_close(direction, wanted / wanted.norm(), rtol=5e-3, atol=0)
