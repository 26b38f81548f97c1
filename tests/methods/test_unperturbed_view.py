"""An adversary on the second view only: h1 = enc(x1; w), h2 = enc(x2; w + eps), the gradient through both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from deltasam.methods import SAM, DeltaSAM
from deltasam.objectives import Contrastive
from deltasam.weighting import Directional, FiniteDifference
from helpers.problems import grads, relative_error


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor], Contrastive]:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4)).double().train()
    x = torch.randn(6, 5).double()
    return encoder, (x, x + 0.1 * torch.randn(6, 5).double()), Contrastive(temperature=0.5)


def loss_with_second_view_at(move: dict[str, Tensor], *, detach: bool) -> tuple[nn.Module, Tensor]:
    model, (first, second), objective = problem()
    torch.manual_seed(3)
    h1 = model(first)
    moved = {n: p + move.get(n, 0) for n, p in model.named_parameters()}
    h2 = functional_call(model, moved, (second,))
    return model, objective.losses(torch.stack((h1.detach() if detach else h1, h2)), None)


def eps_of(weights: Tensor | None, rho: float) -> dict[str, Tensor]:
    model, losses = loss_with_second_view_at({}, detach=True)
    (losses.mean() if weights is None else (weights * losses).sum()).backward()
    g = grads(model)
    norm = torch.cat([v.flatten() for v in g.values()]).norm()
    return {n: rho * v / norm for n, v in g.items()}


@pytest.mark.parametrize(
    "method",
    [SAM(rho=0.1), DeltaSAM(rho=0.1), DeltaSAM(rho=0.1, weighting=Directional())],
    ids=["sam", "delta-sam", "directional"],
)
def test_only_the_second_view_sees_the_perturbation(method: SAM) -> None:
    model, batch, objective = problem()
    torch.manual_seed(3)
    step = method.backward(model, batch, objective)
    reference, losses = loss_with_second_view_at(eps_of(step.weights, 0.1), detach=False)
    losses.mean().backward()
    assert torch.allclose(step.perturbed_losses, losses, rtol=1e-10)
    assert relative_error(grads(model), grads(reference)) < 1e-9


def test_both_weightings_probe_the_second_view_only() -> None:
    weights = []
    for weighting in (FiniteDifference(radius=1e-3), Directional(radius=1e-3)):
        model, batch, objective = problem()
        torch.manual_seed(3)
        weights.append(DeltaSAM(rho=0.1, eta=1e-12, weighting=weighting).backward(model, batch, objective).weights)
    assert torch.allclose(weights[0], weights[1], rtol=1e-3)


def test_an_adversary_on_both_views_is_another_method() -> None:
    results = []
    for adversary in ("second", "both"):
        model, batch, _ = problem()
        torch.manual_seed(3)
        SAM(rho=0.5).backward(model, batch, Contrastive(temperature=0.5, adversary=adversary))
        results.append(grads(model))
    assert relative_error(*results) > 0.01
