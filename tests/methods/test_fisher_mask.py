"""FisherSAM computes its mask from a finite gradient only."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from deltasam.methods import FisherSAM


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1) ** 2


def mask_of(method: FisherSAM) -> Tensor:
    return torch.cat([mask.flatten() for mask in method.state["mask"].values()])


def wanted(model: nn.Module, x: Tensor, keep: float) -> Tensor:
    gradient = torch.autograd.grad(objective(model, x).mean(), list(model.parameters()))
    flat = torch.cat([g.abs().flatten() for g in gradient])
    return flat >= flat.sort().values[-int(keep * len(flat))]


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    model, good = nn.Linear(9, 1).double(), torch.randn(8, 9, dtype=torch.float64)
    bad = good.clone()
    bad[0, 3] = float("inf")
    return model, good, bad


def test_a_mask_from_a_gradient_that_is_not_finite_is_not_kept() -> None:
    model, good, bad = problem()
    method = FisherSAM(keep=0.3)
    for _ in range(3):  # a GradScaler may overflow several times in a row
        assert method.backward(model, bad, objective).skipped
    method.backward(model, good, objective)
    assert torch.equal(mask_of(method), wanted(model, good, 0.3))
    kept = mask_of(method).clone()
    method.backward(model, 1 / good, objective)
    method.backward(model, bad, objective)
    assert torch.equal(mask_of(method), kept)


def test_a_renewal_that_fails_is_repeated_in_the_next_step() -> None:
    model, good, bad = problem()
    method = FisherSAM(keep=0.3, refresh=2)
    for x in (good, good, bad, 1 / good):
        method.backward(model, x, objective)
    assert torch.equal(mask_of(method), wanted(model, 1 / good, 0.3))


def test_a_good_mask_is_kept_before_the_host_knows_it() -> None:
    """On a GPU the host may reach the next step before it knows that the gradient was finite."""
    model, good, _ = problem()
    method = FisherSAM(keep=0.3)
    method.backward(model, good, objective)
    kept = mask_of(method).clone()
    method.state["mask_heard"].fill_(False)
    method.backward(model, 1 / good, objective)
    assert torch.equal(mask_of(method), kept)
    assert bool(method.state["mask_heard"])


def test_a_checkpoint_of_an_earlier_version_has_a_mask_alone() -> None:
    model, good, _ = problem()
    method = FisherSAM(keep=0.3)
    method.backward(model, good, objective)
    state = {key: value for key, value in method.state_dict().items() if key in ("mask", "steps")}
    other = FisherSAM(keep=0.3)
    other.load_state_dict(copy.deepcopy(state))
    other.backward(model, 1 / good, objective)
    assert torch.equal(mask_of(other), mask_of(method))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 1)
        self.unused = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_without_a_gradient_the_step_is_the_plain_one() -> None:
    model, x = Unused(), torch.randn(4, 3)
    plain = torch.autograd.grad(objective(model, x).mean(), model.used.weight)[0]
    method = FisherSAM(params=lambda name, p: "unused" in name)
    for _ in range(2):
        model.zero_grad()
        step = method.backward(model, x, objective)
        assert bool(step.skipped)
        torch.testing.assert_close(model.used.weight.grad, plain)
