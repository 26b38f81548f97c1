"""The comparison with autograd: which groups prove something, and that two are compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import PerInstanceSAM
from deltasam.per_instance import InstancesMixedError, UncoveredError, record
from helpers.instance_reference import relative


class Unseen(nn.Module):
    """Uses a weight that it reads from a list, where no proxy can replace it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 1)
        self.held = [self.a.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(x @ self.held[0].T))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1) ** 2


def error(model: nn.Module, x: Tensor, objective: Callable[..., Tensor]) -> float:
    found = []
    for engine in ("auto", "loop"):
        model.zero_grad()
        PerInstanceSAM(rho=0.1, engine=engine).backward(model, x, objective)  # type: ignore[arg-type]
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return relative(found[0], found[1])


def test_a_first_step_that_overflows_proves_nothing() -> None:
    model, x = Unseen(), torch.randn(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PerInstanceSAM(rho=0.1).backward(model, x, squares, scale=3e38)
    with pytest.warns(UserWarning, match=r"a\.weight.*no rule"):
        assert error(model, x, squares) < 1e-6


def hinge(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, active = batch
    return model(x).squeeze(-1) ** 2 * active


def test_a_last_instance_without_a_gradient_proves_nothing() -> None:
    model, x = Unseen().double(), torch.randn(4, 3).double()
    with pytest.warns(UserWarning, match=r"a\.weight.*no rule"):
        PerInstanceSAM(rho=0.1).backward(model, (x, torch.tensor([1.0, 1.0, 1.0, 0.0]).double()), hinge)


def test_mixing_is_found_although_the_last_instance_has_no_gradient() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), torch.randn(4, 3).double()
    active = torch.tensor([1.0, 1.0, 1.0, 0.0]).double()

    def run() -> Tensor:
        scores = model(x).squeeze(-1)
        return (scores - scores.mean()) ** 2 * active

    with pytest.raises(InstancesMixedError, match="depends on the other instances"):
        record(model, run)


class WithAnother(nn.Module):
    """Has an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_instance_that_is_not_finite_does_not_fail_the_comparison(value: float) -> None:
    x = torch.randn(4, 3)
    x[1] = value
    step = PerInstanceSAM(engine="low-rank").backward(WithAnother(), x, squares)  # the loop would be an error
    assert (step.forwards, step.backwards) == (2, 2)
    assert torch.isfinite(step.perturbed_losses[[0, 2, 3]]).all()


def test_a_batch_without_any_gradient_proves_nothing() -> None:
    model, x = Unseen().double(), torch.randn(4, 3).double()
    PerInstanceSAM(rho=0.1).backward(model, (x, torch.zeros(4).double()), hinge)
    with pytest.warns(UserWarning, match=r"a\.weight.*no rule"):
        PerInstanceSAM(rho=0.1).backward(model, (x, torch.ones(4).double()), hinge)


def test_a_parameter_with_only_unseen_uses_is_not_taken_for_unused() -> None:
    model, x = Unseen().double(), torch.randn(4, 3).double()
    with pytest.raises(UncoveredError, match=r"a\.weight"):
        record(model, lambda: squares(model, x), {"a.weight": model.a.weight})


@pytest.mark.parametrize("group", [1, 2, 3])
def test_rows_of_the_same_group_do_not_mix(group: int) -> None:
    """Several rows per instance: not every other row is another instance."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double()
    held = [model[0].weight]
    x = torch.randn(8, 3).double()

    def run() -> Tensor:
        h = model[1](x @ held[0].T + model[0].bias)
        return model[3](h.tanh()).view(4, 2).square().sum(1)

    with pytest.raises(UncoveredError, match=r"0\.weight"):
        record(model, run, size=4, group=group)


class Distances(nn.Module):
    """Mixes positions by a table of distances, (T, T), as T5 does; for N = T the table looks like a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bias, self.out = nn.Embedding(11, 6), nn.Embedding(32, 1), nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        distances = (places[:, None] - places[None]).abs()
        later = torch.ones_like(distances, dtype=torch.bool).triu(1)
        scores = self.bias(distances).squeeze(-1).masked_fill(later, -torch.inf)
        mixed = torch.softmax(scores, -1) @ self.words(ids)
        found: Tensor = self.out(torch.tanh(mixed))
        return found


def weighted_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Instance 0 has the largest gradient, and a target only at its first position, which sees no other."""
    ids, weights = batch
    each = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none")
    return (each.view_as(ids) * weights).sum(1)


def test_an_instance_that_uses_one_position_proves_nothing_about_the_others() -> None:
    torch.manual_seed(0)
    ids, weights = torch.randint(11, (4, 4)), torch.ones(4, 4).double()
    weights[0] = torch.tensor([50.0, 0.0, 0.0, 0.0])
    gradients = []
    for engine in ("low-rank", "loop"):
        torch.manual_seed(1)
        model = Distances().double()
        PerInstanceSAM(rho=0.3, engine=engine).backward(model, (ids, weights), weighted_losses)
        gradients.append([p.grad for p in model.parameters()])
    for mine, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-12)
