"""Methods that combine gradients, or parts of gradients, of two passes against loops over parameters, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltasam import EmbeddingNoise, RDrop
from deltasam.integrations import MethodOptimizer
from deltasam.methods import ERM, SAM, WSAM, FunctionalSAM, GradientNormPenalty, Method
from deltasam.objectives import CausalLM, Classification, Contrastive, Objective
from deltasam.step.batches import MicroBatches
from deltasam.step.cotangents import Cotangents
from helpers.problems import CNN, TRANSFORMER, TRANSFORMER_NO_DROPOUT, Problem, grads, relative_error

RHO, TOLERANCE = 0.05, 1e-10
Named = dict[str, Tensor]
both = pytest.mark.parametrize("problem", [TRANSFORMER, CNN], ids=lambda p: p.name)


def at(problem: Problem, move: Named, objective: Any) -> tuple[nn.Module, Any]:
    """A fresh model with the weights moved, and what the objective returns with the masks of seed 3."""
    model, batch, _ = problem.make()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in move:
                p += move[name]
    torch.manual_seed(3)
    return model, objective(model, batch)


def plain(problem: Problem, move: Named, objective: Any = Classification()) -> Named:  # noqa: B008 - a frozen record
    model, losses = at(problem, move, objective)
    losses.mean().backward()
    return grads(model)


def uphill(g: Named, rho: float = RHO) -> Named:
    norm = torch.sqrt(sum((v**2).sum() for v in g.values()))
    return {n: rho * v / norm for n, v in g.items()}


def found(problem: Problem, method: Method, objective: Any = Classification(), **options: Any) -> Named:  # noqa: B008
    model, batch, _ = problem.make()
    torch.manual_seed(3)
    method.backward(model, batch, objective, **options)
    return grads(model)


# -- weighted sums of the gradients at w and at w + eps --------------------------------------------------------------


@both
@pytest.mark.parametrize("gamma", [0.3, 0.9])
def test_wsam(problem: Problem, gamma: float) -> None:
    g = plain(problem, {})
    gp = plain(problem, uphill(g))
    wanted = {n: (1 - 2 * gamma) / (1 - gamma) * g[n] + gamma / (1 - gamma) * gp[n] for n in g}
    assert relative_error(found(problem, WSAM(rho=RHO, gamma=gamma)), wanted) < TOLERANCE
    assert relative_error(gp, wanted) > 1e-4


@both
@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_gradient_norm_penalty(problem: Problem, alpha: float) -> None:
    g = plain(problem, {})
    gp = plain(problem, uphill(g))
    wanted = {n: (1 - alpha) * g[n] + alpha * gp[n] for n in g}
    assert relative_error(found(problem, GradientNormPenalty(rho=RHO, alpha=alpha)), wanted) < TOLERANCE


def test_the_penalty_is_that_of_the_norm_of_the_gradient() -> None:
    """Against autograd's second derivative; the difference is of first order in rho."""
    rho, weight = 1e-4, 0.02
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the others have no second derivative
        model, losses = at(TRANSFORMER, {}, Classification())
        used = {n: p for n, p in model.named_parameters() if p.requires_grad and "unused" not in n}
        g = torch.autograd.grad(losses.mean(), list(used.values()), create_graph=True)
        norm = torch.sqrt(sum((v**2).sum() for v in g))
        whole = torch.autograd.grad(losses.mean() + weight * norm, list(used.values()))
    wanted = dict(zip(used, whole, strict=True))
    result = found(TRANSFORMER, GradientNormPenalty(rho=rho, alpha=weight / rho))
    assert relative_error(result, wanted) < 1e-3
    assert relative_error(plain(TRANSFORMER, {}), wanted) > 0.01


@pytest.mark.parametrize("chosen", ["norms", "trained"])
def test_the_two_are_one_family_with_sam_and_plain_training_in_it(chosen: Any) -> None:
    gamma = 0.8
    one = found(TRANSFORMER, WSAM(rho=RHO, gamma=gamma, params=chosen))
    other = found(TRANSFORMER, GradientNormPenalty(rho=RHO, alpha=gamma / (1 - gamma), params=chosen))
    assert relative_error(one, other) < TOLERANCE
    sam = found(TRANSFORMER, SAM(rho=RHO, params=chosen))
    for method in (WSAM(rho=RHO, gamma=0.5, params=chosen), GradientNormPenalty(rho=RHO, alpha=1, params=chosen)):
        result = found(TRANSFORMER, method)
        assert all(torch.equal(result[n], sam[n]) for n in sam)
    erm = found(TRANSFORMER, ERM())
    for method in (WSAM(rho=RHO, gamma=0, params=chosen), GradientNormPenalty(rho=RHO, alpha=0, params=chosen)):
        model, batch, _ = TRANSFORMER.make()
        torch.manual_seed(3)
        assert method.backward(model, batch, Classification()).forwards == 1
        assert all(torch.equal(grads(model)[n], erm[n]) for n in erm)


def test_parameters_that_are_not_perturbed_get_the_weighted_sum_too() -> None:
    g = plain(TRANSFORMER, {})
    gp = plain(TRANSFORMER, uphill({n: v for n, v in g.items() if "norm" in n}))
    wanted = {n: 0.2 * g[n] + 0.8 * gp[n] for n in g}
    result = found(TRANSFORMER, GradientNormPenalty(rho=RHO, alpha=0.8, params="norms"))
    assert relative_error(result, wanted) < TOLERANCE


@pytest.mark.parametrize("gamma", [1, 1.5, -0.1])
def test_the_weight_of_the_sharpness_is_less_than_one(gamma: float) -> None:
    with pytest.raises(ValueError, match=rf"gamma={gamma} must be a number in \[0, 1\)"):
        WSAM(gamma=gamma)


def test_bfloat16_gradients_that_are_equal_do_not_change_in_the_sum() -> None:
    """9 g_p - 8 g, with products that are rounded to bfloat16, differs from g by up to 2%."""
    results = []
    for method in (ERM(), WSAM(rho=1e-30, gamma=0.9)):
        torch.manual_seed(1)
        model = nn.Linear(64, 1, bias=False).bfloat16()
        method.backward(model, torch.randn(16, 64).bfloat16(), lambda model, x: model(x).squeeze(-1).float().square())
        results.append(model.weight.grad)
    assert torch.equal(*results)


# -- Functional SAM --------------------------------------------------------------------------------------------------


def functional(problem: Problem, objective: Any, rho: float = RHO) -> Named:
    """The Jacobian at w + eps times the derivative at w, from two graphs."""
    model, batch, _ = problem.make()
    _, outputs = at(problem, {}, objective.forward)
    leaf = outputs.detach().requires_grad_()
    (cotangent,) = torch.autograd.grad(objective.losses(leaf, batch).mean(), leaf)
    model, outputs = at(problem, uphill(plain(problem, {}, objective), rho), objective.forward)
    outputs.backward(cotangent)
    return grads(model)


OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "classification": Classification,
    "label-smoothing": lambda: Classification(label_smoothing=0.1),
    "rdrop": lambda: RDrop(Classification(), alpha=2.0, passes="two"),
    "noise": lambda: EmbeddingNoise(Classification(), scale=0.1, embeddings="embeddings"),
}


@pytest.mark.parametrize(
    ("problem", "name"),
    [(TRANSFORMER, name) for name in OBJECTIVES] + [(CNN, "classification"), (CNN, "rdrop")],
    ids=str,
)
def test_functional_sam(problem: Problem, name: str) -> None:
    objective = OBJECTIVES[name]()
    wanted = functional(problem, objective)
    assert relative_error(found(problem, FunctionalSAM(rho=RHO), objective), wanted) < TOLERANCE
    assert relative_error(found(problem, SAM(rho=RHO), objective), wanted) > 1e-4


def test_functional_sam_records_the_losses_of_both_forwards() -> None:
    model, batch, _ = TRANSFORMER.make()
    torch.manual_seed(3)
    step = FunctionalSAM(rho=RHO).backward(model, batch, Classification())
    assert torch.equal(step.losses, at(TRANSFORMER, {}, Classification())[1])
    _, losses = at(TRANSFORMER, uphill(plain(TRANSFORMER, {})), Classification())
    assert torch.allclose(step.perturbed_losses, losses, atol=1e-12)


@dataclass(frozen=True)
class Linear(Classification):
    """Losses that are linear in the outputs."""

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return -outputs.gather(1, batch[1].unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class Pair(Classification):
    """Nested outputs, the second of which is computed from the first."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        logits = super().forward(model, batch)
        return {"logits": logits, "more": [logits.tanh(), "not a tensor", logits.detach()]}

    def losses(self, outputs: Any, batch: Any) -> Tensor:
        more = outputs["more"][0].square() * outputs["more"][2]
        return F.cross_entropy(outputs["logits"], batch[1], reduction="none") + more.sum(-1)


def test_linear_losses_make_functional_sam_sam() -> None:
    assert relative_error(found(CNN, FunctionalSAM(rho=RHO), Linear()), found(CNN, SAM(rho=RHO), Linear())) < TOLERANCE


def test_the_derivative_by_one_output_does_not_include_the_path_through_another() -> None:
    objective = Pair()
    model, batch, _ = TRANSFORMER.make()
    _, outputs = at(TRANSFORMER, {}, objective.forward)
    leaves = [outputs["logits"].detach().requires_grad_(), outputs["more"][0].detach().requires_grad_()]
    given = {"logits": leaves[0], "more": [leaves[1], "", outputs["more"][2]]}
    cotangents = torch.autograd.grad(objective.losses(given, batch).mean(), leaves)
    model, outputs = at(TRANSFORMER, uphill(plain(TRANSFORMER, {}, objective)), objective.forward)
    torch.autograd.backward([outputs["logits"], outputs["more"][0]], cotangents)
    assert relative_error(found(TRANSFORMER, FunctionalSAM(rho=RHO), objective), grads(model)) < TOLERANCE


def test_a_view_that_stays_at_w() -> None:
    """The first view is encoded at w; the derivatives of both views are those at w."""
    objective, x, y = Contrastive(temperature=0.5), torch.randn(4, 6).double(), torch.randn(4, 6).double()

    def encoder() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    model = encoder()
    FunctionalSAM(rho=0.3).backward(model, (x, y), objective)
    at_w, moved = encoder(), encoder()
    leaves = [at_w(view).detach().requires_grad_() for view in (x, y)]
    cotangents = torch.autograd.grad(objective.losses(torch.stack(leaves), (x, y)).mean(), leaves)
    ascent = torch.autograd.grad(at_w(y), list(at_w.parameters()), cotangents[1])
    norm = torch.sqrt(sum((v**2).sum() for v in ascent))
    with torch.no_grad():
        for p, g in zip(moved.parameters(), ascent, strict=True):
            p += 0.3 * g / norm
    at_w(x).backward(cotangents[0])
    moved(y).backward(cotangents[1])
    wanted = {n: g + grads(moved)[n] for n, g in grads(at_w).items()}
    assert relative_error(grads(model), wanted) < TOLERANCE


@pytest.mark.parametrize("scale", [0.25, torch.amp.GradScaler("cpu", init_scale=2.0**12)], ids=["number", "scaler"])
def test_micro_batches_and_a_loss_scale(scale: Any) -> None:
    """The parts are weighted by their tokens, of which they have different numbers."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double()
    ids = torch.randint(9, (5, 6))
    labels = ids.clone()
    labels[:2, 2:] = -100
    parts = MicroBatches([(ids[:2], labels[:2]), (ids[2:], labels[2:])])
    FunctionalSAM(rho=0.3).backward(model, (ids, labels), CausalLM())
    whole = grads(model)
    model.zero_grad()
    FunctionalSAM(rho=0.3).backward(model, parts, CausalLM(), scale=scale)
    factor = scale if isinstance(scale, float) else 2.0**12
    assert relative_error({n: g / factor for n, g in grads(model).items()}, whole) < TOLERANCE


def test_functional_sam_under_autocast() -> None:
    """The outputs and their derivatives are bfloat16; the gradient is near that of float32."""
    results = []
    for enabled in (True, False):
        model, batch, _ = TRANSFORMER_NO_DROPOUT.make(torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            FunctionalSAM(rho=0.5).backward(model, batch, Classification())
        results.append(grads(model))
    assert all(g.dtype == torch.float32 for g in results[0].values())
    assert relative_error(*results) < 0.05
    assert relative_error(plain(TRANSFORMER_NO_DROPOUT, {}), {n: g.double() for n, g in results[1].items()}) > 0.1


class Tempered(Classification, nn.Module):
    """An objective with a weight, which is trained too."""

    def __post_init__(self) -> None:
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().losses(outputs / self.temperature, batch)


def test_the_weights_of_an_objective_get_the_gradient_at_the_perturbed_outputs() -> None:
    objective = Tempered()
    found(TRANSFORMER, FunctionalSAM(rho=RHO), objective)
    result = objective.temperature.grad.clone()
    move = uphill(plain(TRANSFORMER, {}, objective))
    objective.temperature.grad = None
    plain(TRANSFORMER, move, objective)
    assert torch.allclose(result, objective.temperature.grad, rtol=1e-10)


@pytest.mark.parametrize("wrapped", [False, True])
def test_functional_sam_refuses_functions(wrapped: bool) -> None:
    model, batch, function = TRANSFORMER.make()
    objective = EmbeddingNoise(function, embeddings="embeddings") if wrapped else function
    with pytest.raises(
        TypeError, match=r"FunctionalSAM also needs the outputs.*deltasam\.Classification\(\).*use SAM"
    ):
        FunctionalSAM().backward(model, batch, objective)
    assert grads(model) == {}


@pytest.mark.parametrize("closure", ["backward", "losses"])
def test_functional_sam_refuses_closures(closure: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = MethodOptimizer(torch.optim.SGD(model.parameters()), FunctionalSAM(), model, closure=closure)
    with pytest.raises(TypeError, match=r"method\.backward\(model, batch, objective\)"):
        optimizer.step(lambda: model(torch.ones(3, 2)).squeeze(-1))


def test_cotangents_are_freed_when_they_are_used() -> None:
    w, kept = torch.ones(3, requires_grad=True), Cotangents()
    kept.record(0, {"a": 2 * w, "b": 3 * w})["a"].square().sum().backward()
    w.grad = None
    outputs = kept.replace(0, {"a": w * 1, "b": w * 1})
    (outputs["a"].sum() + outputs["b"].sum()).backward()
    assert torch.equal(w.grad, torch.full((3,), 4.0))  # "b" had no derivative in the first pass
    assert kept._kept == {}
