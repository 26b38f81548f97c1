"""Every method against its formula, written out as a loop over parameters, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import (
    ASAM,
    ESAM,
    GSAM,
    SAM,
    DeltaSAM,
    FisherSAM,
    FriendlySAM,
    LookSAM,
    MomentumSAM,
    SubsetSAM,
)  # fmt: skip
from deltasam.step.directions import random_direction
from deltasam.step.randomness import Seed
from deltasam.weighting import Directional, FiniteDifference, LossWeights, RandomWeights, Weighting
from helpers.problems import CNN, TRANSFORMER, TRANSFORMER_NO_DROPOUT, Problem, grads, relative_error

TOLERANCE = 1e-10
Named = dict[str, Tensor]


def names(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if p.requires_grad]


def losses_at(problem: Problem, move: Named, instances: Any = slice(None)) -> tuple[nn.Module, Tensor]:
    """A fresh model with the weights moved, and its losses with the masks of seed 3."""
    model, (inputs, labels), objective = problem.make()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in move:
                p += move[name]
    torch.manual_seed(3)
    return model, objective(model, (inputs[instances], labels[instances]))


def gradient_at(problem: Problem, move: Named, weights: Tensor | None = None, instances: Any = slice(None)) -> Named:
    model, losses = losses_at(problem, move, instances)
    (losses.mean() if weights is None else (weights * losses).sum()).backward()
    return grads(model)


def norm(values: Named) -> Tensor:
    return torch.sqrt(sum((v**2).sum() for v in values.values()))


def inner(a: Named, b: Named) -> Tensor:
    return sum((a[n] * b[n]).sum() for n in a if n in b)


def unit(values: Named, rho: float) -> Named:
    return {n: rho * v / norm(values) for n, v in values.items()}


def found(problem: Problem, method: Any, batches: int = 1) -> Named:
    model, batch, objective = problem.make()
    for _ in range(batches):
        model.zero_grad()
        torch.manual_seed(3)
        method.backward(model, batch, objective)
    return grads(model)


both = pytest.mark.parametrize("problem", [TRANSFORMER, CNN], ids=lambda p: p.name)


@both
def test_sam(problem: Problem) -> None:
    wanted = gradient_at(problem, unit(gradient_at(problem, {}), 0.05))
    assert relative_error(found(problem, SAM(rho=0.05)), wanted) < TOLERANCE


def test_sam_on_chosen_parameters() -> None:
    chosen = {n: g for n, g in gradient_at(TRANSFORMER, {}).items() if "norm" in n}
    wanted = gradient_at(TRANSFORMER, unit(chosen, 0.05))
    assert relative_error(found(TRANSFORMER, SAM(rho=0.05, params="norms")), wanted) < TOLERANCE


@both
@pytest.mark.parametrize("eta", [1e-4, 10.0])
def test_delta_sam_given_r(problem: Problem, eta: float) -> None:
    rho = 0.05
    model, _, _ = problem.make()
    params = dict(model.named_parameters())
    draws = random_direction([params[n] for n in names(model)], Seed(7, 0).child(0))
    r = unit(dict(zip(names(model), draws, strict=True)), rho)
    a, b, c = (losses_at(problem, {n: s * v for n, v in r.items()})[1].detach() for s in (0, 1, -1))
    g = (b + c - 2 * a).abs() / (b - c).abs().clamp_min(eta)  # Eq. 5
    eps = unit(gradient_at(problem, {}, weights=g), rho)  # Eq. 6, 7
    model, batch, objective = problem.make()
    torch.manual_seed(3)
    step = DeltaSAM(rho=rho, eta=eta, seed=7).backward(model, batch, objective)
    # The weights divide a difference of order 1e-7 by another one, which leaves nine digits of float64.
    assert torch.allclose(step.weights, g, rtol=1e-6)
    assert relative_error(grads(model), gradient_at(problem, eps)) < 1e-8
    given = unit(gradient_at(problem, {}, weights=step.weights), rho)
    assert relative_error(grads(model), gradient_at(problem, given)) < TOLERANCE


def test_delta_sam_probes_on_every_kth_step_only() -> None:
    model, batch, objective = TRANSFORMER.make()
    method = DeltaSAM(probe_every=3)
    steps = [method.backward(model, batch, objective) for _ in range(6)]
    assert [(s.forwards, s.backwards) for s in steps] == [(4, 2), (2, 2), (2, 2)] * 2
    assert [s.weights is not None for s in steps] == [True, False, False] * 2


@both
def test_asam(problem: Problem) -> None:
    rho, eta = 0.5, 0.01
    model, _, _ = problem.make()
    g = gradient_at(problem, {})
    t = {n: p.detach().abs() + eta if "weight" in n else torch.ones_like(p) for n, p in model.named_parameters()}
    eps = {n: rho * t[n] ** 2 * g[n] / norm({m: t[m] * g[m] for m in g}) for n in g}
    assert relative_error(found(problem, ASAM(rho=rho, eta=eta)), gradient_at(problem, eps)) < TOLERANCE


@both
def test_gsam(problem: Problem) -> None:
    g = gradient_at(problem, {})
    gp = gradient_at(problem, unit(g, 0.05))
    perpendicular = {n: g[n] - inner(g, gp) / inner(gp, gp) * gp[n] for n in g}
    assert abs(inner(perpendicular, gp)) < 1e-12
    wanted = {n: gp[n] - 0.4 * perpendicular[n] for n in g}
    assert relative_error(found(problem, GSAM(rho=0.05, alpha=0.4)), wanted) < TOLERANCE


@both
def test_look_sam_over_two_cycles(problem: Problem) -> None:
    g = gradient_at(problem, {})
    gs = gradient_at(problem, unit(g, 0.05))
    gv = {n: gs[n] - inner(gs, g) / inner(g, g) * g[n] for n in g}
    between = {n: g[n] + 0.7 * norm(g) / norm(gv) * gv[n] for n in g}
    for batches, wanted in ((1, gs), (2, between), (3, between), (4, gs)):
        assert relative_error(found(problem, LookSAM(rho=0.05, k=3, alpha=0.7), batches), wanted) < TOLERANCE


def moved(problem: Problem, steps: int) -> list[Named]:
    """Other weights for every step; otherwise all gradients would be the same without dropout."""
    model, _, _ = problem.make()
    random = torch.Generator().manual_seed(5)
    shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
    return [{n: 0.1 * torch.randn(s, generator=random).double() for n, s in shapes.items()} for _ in range(steps)]


def added(a: Named, b: Named, factor: float = 1.0) -> Named:
    return {n: a[n] + factor * b[n] if n in b else a[n] for n in a}


def found_along(problem: Problem, method: Any, moves: list[Named]) -> list[Named]:
    """The gradients of steps at weights that move in between."""
    results = []
    for move in moves:
        model, batch, objective = problem.make()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in move:
                    p += move[name]
        torch.manual_seed(3)
        method.backward(model, batch, objective)
        results.append(grads(model))
    return results


@both
def test_friendly_sam(problem: Problem) -> None:
    rho, sigma, decay = 0.05, 0.7, 0.6
    moves = moved(problem, 4)
    average = {n: torch.zeros_like(v) for n, v in moves[0].items()}
    wanted = []
    for move in moves:
        g = gradient_at(problem, move)
        average = {n: decay * m + (1 - decay) * g[n] if n in g else m for n, m in average.items()}
        direction = {n: g[n] - sigma * average[n] for n in g}
        wanted.append(gradient_at(problem, added(move, unit(direction, rho))))
    results = found_along(problem, FriendlySAM(rho=rho, sigma=sigma, decay=decay), moves)
    assert max(map(relative_error, results, wanted)) < TOLERANCE


@both
def test_momentum_sam(problem: Problem) -> None:
    rho, decay = 0.3, 0.6
    moves = moved(problem, 4)
    momentum: Named = {}
    wanted = []
    for move in moves:
        at = added(move, unit(momentum, rho), -1) if momentum else move
        g = gradient_at(problem, at)
        momentum = {n: decay * momentum.get(n, 0) + (1 - decay) * g[n] for n in g}
        wanted.append(g)
    results = found_along(problem, MomentumSAM(rho=rho, decay=decay), moves)
    assert max(map(relative_error, results, wanted)) < TOLERANCE
    plain = [gradient_at(problem, move) for move in moves]
    assert relative_error(results[0], plain[0]) < TOLERANCE
    assert min(map(relative_error, results[1:], plain[1:])) > 1e-3


def test_look_sam_really_costs_one_and_one_kth() -> None:
    model, batch, objective = TRANSFORMER.make()
    method = LookSAM(k=10)
    steps = [method.backward(model, batch, objective) for _ in range(20)]
    assert sum(s.forwards for s in steps) == sum(s.backwards for s in steps) == 22


def test_esam() -> None:
    rho, beta, gamma = 0.05, 0.5, 0.5
    problem = TRANSFORMER_NO_DROPOUT  # the kept instances have another shape, hence other masks
    method = ESAM(rho=rho, beta=beta, gamma=gamma, seed=1)
    model, _, _ = problem.make()
    chosen = [n for n, used in zip(names(model), method._draw(len(names(model))), strict=True) if used]
    assert 0 < len(chosen) < len(names(model))
    g = {n: v for n, v in gradient_at(problem, {}).items() if n in chosen}
    eps = unit(g, rho / beta)
    rise = losses_at(problem, eps)[1] - losses_at(problem, {})[1]
    keep = rise.argsort(descending=True)[: math.ceil(gamma * len(rise))].sort().values
    assert relative_error(found(problem, method), gradient_at(problem, eps, instances=keep)) < TOLERANCE


def test_esam_draws_each_tensor_with_probability_beta() -> None:
    method = ESAM(beta=0.3)
    draws = []
    for step in range(400):
        method.state["steps"] = step
        draws.append(method._draw(50))
    share = torch.tensor(draws, dtype=torch.float64)
    assert abs(share.mean() - 0.3) < 0.015
    assert share.mean(0).min() > 0.2
    assert share.mean(0).max() < 0.4


def test_subset_sam() -> None:
    problem = TRANSFORMER_NO_DROPOUT
    eps = unit(gradient_at(problem, {}, instances=slice(0, 2)), 0.05)  # ceil(0.25 * 5) = 2
    assert relative_error(found(problem, SubsetSAM(rho=0.05)), gradient_at(problem, eps)) < TOLERANCE


@both
def test_fisher_sam(problem: Problem) -> None:
    g = gradient_at(problem, {})
    entries = torch.cat([v.flatten() ** 2 for v in g.values()])
    threshold = entries.sort(descending=True).values[int(0.1 * entries.numel()) - 1]
    eps = {n: 0.05 * torch.where(g[n] ** 2 >= threshold, g[n], 0.0) / norm(g) for n in g}
    assert relative_error(found(problem, FisherSAM(rho=0.05, keep=0.1)), gradient_at(problem, eps)) < TOLERANCE


def test_fisher_sam_renews_its_mask() -> None:
    model, batch, objective = TRANSFORMER.make()
    method = FisherSAM(refresh=2)
    masks = []
    for _ in range(4):
        method.backward(model, batch, objective)
        masks.append(method.state["mask"])
    assert masks[0] is masks[1]
    assert masks[1] is not masks[2]
    assert masks[2] is masks[3]


def test_gsams_radius_follows_the_learning_rate_within_its_range() -> None:
    ends = {"lr_max": 1e-3, "lr_min": 2e-4, "rho_max": 0.1, "rho_min": 0.02}
    for lr, rho in ((1e-3, 0.1), (2e-4, 0.02), (6e-4, 0.06), (4e-4, 0.04)):
        assert GSAM.rho_at(lr=lr, **ends) == pytest.approx(rho)


def test_esam_perturbs_one_tensor_if_none_was_drawn_and_not_always_the_same() -> None:
    method, draws = ESAM(beta=1e-9), []
    for step in range(60):
        method.state["steps"] = step
        draws.append(method._draw(4))
    assert all(sum(draw) == 1 for draw in draws)
    assert all(any(column) for column in zip(*draws, strict=True))


@pytest.mark.parametrize("weighting", [FiniteDifference(), Directional(), RandomWeights(of=LossWeights())], ids=str)
def test_every_step_has_another_direction_and_the_same_after_a_resume(weighting: Weighting) -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    method = DeltaSAM(weighting=weighting)
    weights = [method.backward(model, batch, objective).weights for _ in range(4)]  # all at the same w
    for later in weights[1:]:
        assert not torch.allclose(later, weights[0], rtol=1e-3)
    resumed = DeltaSAM(weighting=weighting)
    resumed.load_state_dict({"steps": 3})
    assert torch.equal(resumed.backward(model, batch, objective).weights, weights[3])
