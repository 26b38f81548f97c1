"""Rows without a target token: a part of a step may have no targets, a complete step must have some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltasam import MicroBatches
from deltasam.methods import ESAM, SAM, DeltaSAM, FreeLB, Method, PerInstanceSAM
from deltasam.objectives import CausalLM, RDrop, Tokens
from deltasam.per_instance import instance_gradient_norms

IDS = torch.randint(1, 9, (5, 6), generator=torch.Generator().manual_seed(0))
LABELS = IDS.clone()
LABELS[1, 2:] = -100
LABELS[3:] = -100  # the last two sequences have no target
WHOLE = (IDS, LABELS)
PARTS = MicroBatches([(IDS[:3], LABELS[:3]), (IDS[3:], LABELS[3:])])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 9)).double()


def losses_by_hand(model: nn.Module, reduction: str) -> Tensor:
    nll = F.cross_entropy(model(IDS).flatten(0, 1), LABELS.flatten(), reduction="none", ignore_index=-100)
    counts = (LABELS != -100).sum(1).double()
    summed = nll.view(5, 6).sum(1)
    return summed * 5 / counts.sum() if reduction == "token" else summed / counts.clamp(min=1)


def sam_by_hand(reduction: str, rho: float) -> list[Tensor]:
    model = network()
    params = list(model.parameters())
    gradient = torch.autograd.grad(losses_by_hand(model, reduction).mean(), params)
    norm = torch.stack([g.square().sum() for g in gradient]).sum().sqrt()
    with torch.no_grad():
        for p, g in zip(params, gradient, strict=True):
            p += rho * g / norm
    return list(torch.autograd.grad(losses_by_hand(model, reduction).mean(), params))


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("batch", [WHOLE, PARTS], ids=["whole", "parts"])
def test_sam_equals_that_of_the_whole_batch(reduction: Any, batch: Any) -> None:
    model = network()
    step = SAM(rho=0.1).backward(model, batch, Tokens(reduction=reduction))
    torch.testing.assert_close(step.losses, losses_by_hand(network(), reduction), rtol=1e-12, atol=1e-12)
    for p, wanted in zip(model.parameters(), sam_by_hand(reduction, 0.1), strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("batch", [WHOLE, PARTS], ids=["whole", "parts"])
def test_the_loop_over_instances(reduction: Any, batch: Any) -> None:
    """A row without a target has no gradient and stays at w; the others are perturbed as without it."""
    model, expected = network(), [torch.zeros_like(p) for p in network().parameters()]
    for i in range(5):
        other = network()
        params = list(other.parameters())
        gradient = torch.autograd.grad(losses_by_hand(other, reduction)[i], params)
        norm = torch.stack([g.square().sum() for g in gradient]).sum().sqrt()
        with torch.no_grad():
            for p, g in zip(params, gradient, strict=True):
                p += 0.1 * g / norm if norm > 0 else 0
        found = torch.autograd.grad(losses_by_hand(other, reduction)[i] / 5, params)
        expected = [e + g for e, g in zip(expected, found, strict=True)]
    PerInstanceSAM(rho=0.1, engine="loop").backward(model, batch, Tokens(reduction=reduction))
    for p, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_norms_by_the_loop_are_exact(reduction: Any) -> None:
    wanted = []
    for i in range(5):
        model = network()
        gradient = torch.autograd.grad(losses_by_hand(model, reduction)[i], list(model.parameters()))
        wanted.append(torch.stack([g.square().sum() for g in gradient]).sum().sqrt())
    found = instance_gradient_norms(network(), WHOLE, Tokens(reduction=reduction), engine="loop")
    torch.testing.assert_close(found.double(), torch.stack(wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "method", [DeltaSAM(), FreeLB(embeddings="0"), ESAM(gamma=1.0)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("objective", [CausalLM(), RDrop(Tokens())], ids=lambda o: type(o).__name__)
def test_other_methods_and_objectives(method: Method, objective: Any) -> None:
    model = network()
    step = method.backward(model, PARTS, objective)
    assert (step.losses[3:] == 0).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("method", [SAM(), PerInstanceSAM(engine="loop")], ids=lambda m: type(m).__name__)
def test_a_step_without_any_target_is_refused(reduction: Any, method: Method) -> None:
    nothing = torch.full_like(IDS, -100)
    whole, parts = (IDS, nothing), MicroBatches([(IDS[:3], nothing[:3]), (IDS[3:], nothing[3:])])
    for objective in (Tokens(reduction=reduction), RDrop(Tokens(reduction=reduction))):
        for batch in (whole, parts):
            with pytest.raises(ValueError, match=r"every target token of the batch is ignored"):
                method.backward(network(), batch, objective)
    with pytest.raises(ValueError, match=r"every target token of the batch is ignored"):
        Tokens(reduction=reduction)(network(), whole)
