"""The methods with another ascent against their formulas, written out as a loop over parameters, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import AWP, ERM, RWSAM, SAM, TRAM, Classification, MicroBatches, MultiStepSAM, Regression
from deltasam.step.directions import random_direction
from deltasam.step.randomness import Seed
from helpers.problems import CNN, TRANSFORMER, TRANSFORMER_NO_DROPOUT, Problem, cross_entropy, grads, relative_error

TOLERANCE = 1e-10
Named = dict[str, Tensor]
both = pytest.mark.parametrize("problem", [TRANSFORMER, CNN], ids=lambda p: p.name)


def losses_at(problem: Problem, move: Named) -> tuple[nn.Module, Tensor]:
    """A fresh model with the weights moved, and its losses with the masks of seed 3."""
    model, batch, objective = problem.make()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in move:
                p += move[name]
    torch.manual_seed(3)
    return model, objective(model, batch)


def gradient_at(problem: Problem, move: Named, weights: Tensor | None = None) -> Named:
    model, losses = losses_at(problem, move)
    (losses.mean() if weights is None else (weights * losses).sum()).backward()
    return grads(model)


def norm(values: Named) -> Tensor:
    return torch.sqrt(sum((v**2).sum() for v in values.values()))


def scaled(values: Named, factor: Any) -> Named:
    return {n: factor * v for n, v in values.items()}


def unit(values: Named, rho: Any) -> Named:
    return scaled(values, rho / norm(values))


def found(problem: Problem, method: Any, objective: Any = cross_entropy) -> Named:
    model, batch, _ = problem.make()
    torch.manual_seed(3)
    method.backward(model, batch, objective)
    return grads(model)


# -- RWSAM ------------------------------------------------------------------------------------------------------------


def softmax(norms: Tensor, lam: float) -> Tensor:
    return torch.softmax(lam * norms / norms.mean(), 0)


@both
def test_rw_sam_given_the_directions(problem: Problem) -> None:
    rho, lam = 0.05, 1.7
    model, _, _ = problem.make()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    slopes = []
    for draw in range(2):
        z = dict(zip(named, random_direction(list(named.values()), Seed(7, 0).child(draw)), strict=True))
        there = losses_at(problem, unit(z, rho))[1] - losses_at(problem, {})[1]
        slopes.append(there.detach())
    g = softmax(torch.stack(slopes).square().mean(0).sqrt(), lam)
    wanted = gradient_at(problem, unit(gradient_at(problem, {}, weights=g), rho))
    assert relative_error(found(problem, RWSAM(rho=rho, lam=lam, samples=2, seed=7)), wanted) < 1e-8
    assert relative_error(found(problem, SAM(rho=rho)), wanted) > 1e-3


def test_rw_sam_with_exact_norms() -> None:
    problem, rho, lam = TRANSFORMER, 0.05, 1.7
    each = [gradient_at(problem, {}, weights=torch.eye(5).double()[i]) for i in range(5)]
    g = softmax(torch.stack([norm(one) for one in each]), lam)
    wanted = gradient_at(problem, unit(gradient_at(problem, {}, weights=g), rho))
    assert relative_error(found(problem, RWSAM(rho=rho, lam=lam, norms="exact")), wanted) < TOLERANCE
    assert relative_error(found(problem, SAM(rho=rho)), wanted) > 1e-3


@pytest.mark.parametrize("norms", ["exact", "finite-difference"])
def test_rw_sam_without_a_slope_is_sam(norms: Any) -> None:
    wanted = found(TRANSFORMER, SAM(rho=0.05))
    assert relative_error(found(TRANSFORMER, RWSAM(rho=0.05, lam=0.0, norms=norms)), wanted) < TOLERANCE


# -- MultiStepSAM -----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("steps", "stride"), [(1, 0.4), (2, None), (3, None), (3, 0.25)])
def test_multi_step_sam(problem: Problem, steps: int, stride: float | None) -> None:
    rho = 0.3
    length = rho * (2 / steps if stride is None else stride)
    eps: Named = {}
    for _ in range(steps):
        step = unit(gradient_at(problem, eps), length)
        eps = {n: eps.get(n, 0) + v for n, v in step.items()}
        if norm(eps) > rho:
            eps = unit(eps, rho)
    method = MultiStepSAM(rho=rho, ascent_steps=steps, stride=stride)
    assert relative_error(found(problem, method), gradient_at(problem, eps)) < TOLERANCE
    assert relative_error(found(problem, SAM(rho=rho)), gradient_at(problem, eps)) > 1e-3


def test_one_step_is_sam_bit_for_bit() -> None:
    one, sam = found(TRANSFORMER, MultiStepSAM(rho=0.05, ascent_steps=1)), found(TRANSFORMER, SAM(rho=0.05))
    assert all(torch.equal(one[name], g) for name, g in sam.items())


def test_a_later_gradient_that_is_not_finite_adds_nothing() -> None:
    model, batch, objective = TRANSFORMER.make()
    calls = 0

    def spoil(grad: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return grad * float("nan") if calls == 2 else grad

    def spoilt(model: nn.Module, batch: Any) -> Tensor:
        losses = objective(model, batch)
        losses.register_hook(spoil)
        return losses

    torch.manual_seed(3)
    step = MultiStepSAM(rho=0.05, ascent_steps=2).backward(model, batch, spoilt)
    assert calls == 3
    assert not step.skipped
    assert relative_error(grads(model), found(TRANSFORMER, SAM(rho=0.05))) < TOLERANCE


# -- AWP --------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("bound", [0.01, None])
@pytest.mark.parametrize("add_plain", [True, False])
def test_awp(problem: Problem, bound: float | None, add_plain: bool) -> None:
    adv_lr = 0.1
    model, _, _ = problem.make()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    plain = gradient_at(problem, {})
    eps: Named = {}
    for n, g in plain.items():
        if "weight" in n:
            eps[n] = adv_lr * weights[n].norm() * g / g.norm()
            if bound is not None:
                most = bound * weights[n].abs()
                clipped = torch.where(eps[n] > most, most, torch.where(eps[n] < -most, -most, eps[n]))
                assert not torch.equal(clipped, eps[n])
                eps[n] = clipped
    there = gradient_at(problem, eps)
    wanted = {n: there[n] + plain[n] for n in there} if add_plain else there
    method = AWP(adv_lr=adv_lr, adv_eps=bound, add_plain=add_plain)
    assert relative_error(found(problem, method), wanted) < TOLERANCE


def test_awp_adds_the_plain_gradient_of_parameters_that_do_not_move() -> None:
    plain = gradient_at(TRANSFORMER, {})
    moved = found(TRANSFORMER, AWP(params="norms", add_plain=False))
    both_gradients = found(TRANSFORMER, AWP(params="norms"))
    assert relative_error(both_gradients, {n: moved[n] + plain[n] for n in plain}) < TOLERANCE


def test_awp_chooses_by_name() -> None:
    everything = found(TRANSFORMER, AWP(adv_param=""))
    assert relative_error(everything, found(TRANSFORMER, AWP())) > 1e-6
    by_predicate = AWP(adv_param="", params=lambda name, p: p.requires_grad and "weight" in name)
    assert relative_error(found(TRANSFORMER, by_predicate), found(TRANSFORMER, AWP())) == 0
    with pytest.raises(ValueError, match=r"adv_param='kernel' is in no name .*adv_param=''"):
        found(TRANSFORMER, AWP(adv_param="kernel"))


@pytest.mark.parametrize("options", [{"adv_lr": 0.0}, {"adv_eps": 0.0}])
def test_awp_that_cannot_move_is_plain_training(options: dict[str, float]) -> None:
    wanted, result = found(TRANSFORMER, ERM()), found(TRANSFORMER, AWP(**options))
    assert all(torch.equal(result[name], g) for name, g in wanted.items())


# -- TRAM -------------------------------------------------------------------------------------------------------------


def divergence(q: Tensor, p: Tensor) -> Tensor:
    """The mean of KL(q || p) over the instances, term by term."""
    terms = [q[i, c] * (q[i, c].log() - p[i, c].log()) for i in range(q.shape[0]) for c in range(q.shape[1])]
    return sum(terms) / q.shape[0]


def probabilities(model: nn.Module, inputs: Tensor, noise: Tensor | None = None) -> Tensor:
    """With the masks of seed 3, as in the step."""
    torch.manual_seed(3)
    handle = model.embeddings.register_forward_hook(lambda m, args, out: out if noise is None else out + noise)
    with torch.no_grad():
        p = model(inputs).softmax(-1)
    handle.remove()
    return p


def test_tram_x(monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    monkeypatch.setattr("deltasam.methods._tram.draw", lambda site, scale, kind, *, generator: scale * z)
    model, (inputs, _), _ = TRANSFORMER.make()
    d = divergence(probabilities(model, inputs, 0.7 * z), probabilities(model, inputs))
    wanted = gradient_at(TRANSFORMER, unit(gradient_at(TRANSFORMER, {}), 3.0 * d))
    method = TRAM(rho=3.0, noise_scale=0.7, embeddings="embeddings")
    assert 3.0 * d > 0.01
    assert relative_error(found(TRANSFORMER, method, Classification()), wanted) < TOLERANCE


def test_tram_draws_other_noise_in_every_step_and_the_same_after_a_resume() -> None:
    model, batch, _ = TRANSFORMER_NO_DROPOUT.make()
    method, results = TRAM(rho=5.0, embeddings="embeddings"), []
    for _ in range(2):
        model.zero_grad()
        method.backward(model, batch, Classification())
        results.append(grads(model))
    assert relative_error(*results) > 1e-6
    resumed = TRAM(rho=5.0, embeddings="embeddings")
    resumed.load_state_dict({"steps": 1})
    model.zero_grad()
    resumed.backward(model, batch, Classification())
    assert relative_error(grads(model), results[1]) == 0


def test_the_noise_of_tram_has_the_size_and_the_distribution_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from deltasam.methods import _tram

    drawn, draw = [], _tram.draw
    monkeypatch.setattr(_tram, "draw", lambda *a, **k: drawn.append(draw(*a, **k)) or drawn[-1])
    for kind in ("normal", "uniform"):
        found(TRANSFORMER, TRAM(noise_scale=0.2, noise=kind, embeddings="embeddings"), Classification())
    normal, uniform = drawn
    assert normal.shape == uniform.shape == (5, 7, 6)
    assert float(normal.std()) == pytest.approx(0.2, rel=0.2)
    assert float(normal.abs().max()) > 0.3
    assert float(uniform.abs().max()) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("split", [False, True])
def test_tram_theta_over_three_steps(split: bool) -> None:
    """The weights change between the steps; the first step has nothing to compare with."""
    problem, rho = TRANSFORMER_NO_DROPOUT, 40.0
    random = torch.Generator().manual_seed(5)
    model, (inputs, labels), _ = problem.make()
    shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
    moves = [{n: 0.1 * k * torch.randn(s, generator=random).double() for n, s in shapes.items()} for k in range(3)]
    method = TRAM(rho=rho, against="previous")
    batch: Any = (inputs, labels)
    if split:
        batch = MicroBatches([(inputs[:2], labels[:2]), (inputs[2:], labels[2:])])
    before: Tensor | None = None
    for move in moves:
        model, _, _ = problem.make()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in move:
                    p += move[name]
        now = probabilities(model, inputs)
        d = 0.0 if before is None else divergence(before, now)
        before = now
        torch.manual_seed(3)
        step = method.backward(model, batch, Classification())
        g = gradient_at(problem, move)
        eps = unit(g, rho * d)
        wanted = gradient_at(problem, {n: move[n] + eps.get(n, 0) for n in move})
        assert relative_error(grads(model), wanted) < 1e-9
        assert bool(step.skipped) == (d == 0)
        assert float(step.grad_norm) == pytest.approx(float(norm(g)))


@pytest.mark.parametrize("objective", [cross_entropy, Regression()], ids=["callable", "regression"])
def test_tram_needs_class_probabilities(objective: Any) -> None:
    with pytest.raises(TypeError, match=r"objective=.* has no class probabilities.*Classification\(\)"):
        found(TRANSFORMER, TRAM(embeddings="embeddings"), objective)
