"""Every method over frozen weights against its formula in float64: eps from their gradient, the rest from the others'.

The formulas are those of ``test_references.py``. Here ``gradient_at`` differentiates by the frozen matrices, too, and
``trained_at`` by what is trained.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import ASAM, ESAM, GSAM, SAM, DeltaSAM, FisherSAM, FriendlySAM, LookSAM, SubsetSAM
from deltasam.step.directions import random_direction
from deltasam.step.randomness import Seed
from helpers.frozen import ADAPTED, ADAPTED_NO_DROPOUT, base_names
from helpers.problems import Problem, grads, relative_error

TOLERANCE = 1e-10
RHO = 0.05
Named = dict[str, Tensor]


def losses_at(move: Named, problem: Problem = ADAPTED, instances: Any = slice(None)) -> tuple[nn.Module, Tensor]:
    """A fresh model with weights moved, whose adapted matrices require gradients; its losses with masks of seed 3."""
    model, (inputs, labels), objective = problem.make()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in move:
                p += move[name]
    torch.manual_seed(3)
    return model, objective(model, (inputs[instances], labels[instances]))


def both_at(
    move: Named, problem: Problem = ADAPTED, weights: Tensor | None = None, instances: Any = slice(None)
) -> tuple[Named, Named]:
    """The gradients of the frozen matrices, and of what is trained."""
    model, (inputs, labels), objective = problem.make()
    names, trained = base_names(model), {name for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p += move.get(name, torch.zeros_like(p))
            p.requires_grad_(name in trained or name in names)
    torch.manual_seed(3)
    losses = objective(model, (inputs[instances], labels[instances]))
    (losses.mean() if weights is None else (weights * losses).sum()).backward()
    found = grads(model)
    return {n: found[n] for n in names}, {n: g for n, g in found.items() if n in trained}


def norm(values: Named) -> Tensor:
    return torch.sqrt(sum((v**2).sum() for v in values.values()))


def inner(a: Named, b: Named) -> Tensor:
    return sum((a[n] * b[n]).sum() for n in a)


def unit(values: Named, rho: float = RHO) -> Named:
    return {n: rho * v / norm(values) for n, v in values.items()}


def found(method: Any, problem: Problem = ADAPTED, steps: int = 1, moves: list[Named] | None = None) -> Named:
    """The gradient of the last of several steps, at weights that may move in between."""
    for k in range(steps):
        model, batch, objective = problem.make()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if moves is not None and name in moves[k]:
                    p += moves[k][name]
        torch.manual_seed(3)
        method.backward(model, batch, objective)
    return grads(model)


def assert_equal(mine: Named, wanted: Named, tolerance: float = TOLERANCE) -> None:
    assert mine.keys() == wanted.keys()
    assert relative_error(mine, wanted) < tolerance


def test_sam() -> None:
    eps = unit(both_at({})[0])
    assert_equal(found(SAM(rho=RHO, params="base")), both_at(eps)[1])


def test_sam_over_a_predicate() -> None:
    frozen, trained = both_at({})
    chosen = {n: g for n, g in {**frozen, **trained}.items() if n.startswith("back.")}
    assert {"back.base_layer.weight", "back.lora_A.default.weight"} <= chosen.keys()
    mine = found(SAM(rho=RHO, params=lambda name, p: name.startswith("back.") and p.ndim > 1))
    assert_equal(mine, both_at(unit(chosen))[1])


def test_delta_sam_given_r() -> None:
    model, batch, objective = ADAPTED.make()
    params = dict(model.named_parameters())
    names = base_names(model)
    draws = random_direction([params[n] for n in names], Seed(7, 0).child(0))
    r = unit(dict(zip(names, draws, strict=True)))
    a, b, c = (losses_at({n: s * v for n, v in r.items()})[1].detach() for s in (0, 1, -1))
    g = (b + c - 2 * a).abs() / (b - c).abs().clamp_min(1e-4)  # Eq. 5
    torch.manual_seed(3)
    step = DeltaSAM(rho=RHO, eta=1e-4, seed=7, params="base").backward(model, batch, objective)
    assert torch.allclose(step.weights, g, rtol=1e-5)  # a quotient of small differences
    eps = unit(both_at({}, weights=step.weights)[0])  # Eq. 6, 7
    assert_equal(grads(model), both_at(eps)[1])


def test_asam() -> None:
    rho, eta = 0.5, 0.01
    g = both_at({})[0]
    params = dict(ADAPTED.make()[0].named_parameters())
    t = {n: params[n].detach().abs() + eta for n in g}
    eps = {n: rho * t[n] ** 2 * g[n] / norm({m: t[m] * g[m] for m in g}) for n in g}
    assert_equal(found(ASAM(rho=rho, eta=eta, params="base")), both_at(eps)[1])


def test_gsam() -> None:
    frozen, g = both_at({})
    gp = both_at(unit(frozen))[1]
    perpendicular = {n: g[n] - inner(g, gp) / inner(gp, gp) * gp[n] for n in g}
    wanted = {n: gp[n] - 0.4 * perpendicular[n] for n in g}
    assert_equal(found(GSAM(rho=RHO, alpha=0.4, params="base")), wanted)


def test_look_sam_over_two_cycles() -> None:
    frozen, g = both_at({})
    gs = both_at(unit(frozen))[1]
    gv = {n: gs[n] - inner(gs, g) / inner(g, g) * g[n] for n in g}
    between = {n: g[n] + 0.7 * norm(g) / norm(gv) * gv[n] for n in g}
    for steps, wanted in ((1, gs), (2, between), (3, between), (4, gs)):
        assert_equal(found(LookSAM(rho=RHO, k=3, alpha=0.7, params="base"), steps=steps), wanted)


def test_friendly_sam() -> None:
    sigma, decay = 0.7, 0.6
    random = torch.Generator().manual_seed(5)
    adapters = {n: p.shape for n, p in ADAPTED.make()[0].named_parameters() if p.requires_grad}
    moves = [{n: 0.1 * torch.randn(s, generator=random).double() for n, s in adapters.items()} for _ in range(3)]
    average: Named = {}
    for steps, move in enumerate(moves, 1):
        g = both_at(move)[0]
        average = {n: decay * average.get(n, torch.zeros_like(v)) + (1 - decay) * v for n, v in g.items()}
        eps = unit({n: g[n] - sigma * average[n] for n in g})
        method = FriendlySAM(rho=RHO, sigma=sigma, decay=decay, params="base")
        assert_equal(found(method, steps=steps, moves=moves), both_at({**move, **eps})[1])


def test_esam() -> None:
    problem, gamma = ADAPTED_NO_DROPOUT, 0.5  # the kept instances have another shape, hence other masks
    eps = unit(both_at({}, problem)[0])
    rise = losses_at(eps, problem)[1] - losses_at({}, problem)[1]
    keep = rise.argsort(descending=True)[: math.ceil(gamma * len(rise))].sort().values
    wanted = both_at(eps, problem, instances=keep)[1]
    assert_equal(found(ESAM(rho=RHO, beta=1.0, gamma=gamma, params="base"), problem), wanted)


def test_subset_sam() -> None:
    problem = ADAPTED_NO_DROPOUT
    eps = unit(both_at({}, problem, instances=slice(0, 2))[0])  # ceil(0.25 * 5) = 2
    assert_equal(found(SubsetSAM(rho=RHO, params="base"), problem), both_at(eps, problem)[1])


def test_fisher_sam() -> None:
    g = both_at({})[0]
    entries = torch.cat([v.flatten() ** 2 for v in g.values()])
    threshold = entries.sort(descending=True).values[int(0.1 * entries.numel()) - 1]
    eps = {n: RHO * torch.where(g[n] ** 2 >= threshold, g[n], 0.0) / norm(g) for n in g}
    assert_equal(found(FisherSAM(rho=RHO, keep=0.1, params="base")), both_at(eps)[1])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_sam_over_frozen_weights_in_low_precision_arrives(kind: torch.dtype) -> None:
    """Far below the spacing of bfloat16, where rounding to nearest would lose all of it."""
    from deltasam import measured_arrival

    torch.manual_seed(0)
    rise, share = [], []
    for dtype in (torch.float64, kind):
        torch.manual_seed(0)
        model = _wide().bfloat16().to(dtype)  # the same values in all precisions
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)
        for k in range(20 if dtype is torch.bfloat16 else 1):
            method = SAM(rho=2e-3, params="base")
            method.state["steps"] = k  # another rounding
            with measured_arrival():
                step = method.backward(model, x, lambda model, x: model(x).double().square().sum(-1))
            share.append(float(step.arrived))
            rise.append(float((step.perturbed_losses - step.losses).mean()))
    assert sum(share) / len(share) == pytest.approx(1, abs=0.1)
    if kind is torch.float32:
        assert rise[1] == pytest.approx(rise[0], rel=1e-2)


def _wide() -> nn.Module:
    from helpers.frozen import Adapter

    model = nn.Sequential(Adapter(nn.Linear(64, 64)), nn.Tanh(), Adapter(nn.Linear(64, 8)))
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    return model
