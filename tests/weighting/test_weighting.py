"""Instance weights: against Hessian-vector products, the derivation of the paper, and for arbitrary losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from deltasam.methods import SAM, DeltaSAM
from deltasam.objectives import Contrastive
from deltasam.step.batches import MicroBatches
from deltasam.step.directions import random_direction
from deltasam.step.norms import global_norm
from deltasam.step.passes import Passes
from deltasam.step.randomness import Seed
from deltasam.weighting import (
    Directional,
    FiniteDifference,
    LossWeights,
    OwnGradient,
    RandomWeights,
    Uniform,
    Weighting,
    usable,
)
from deltasam.weighting._directional import derivatives_along
from deltasam.weighting._finite_difference import difference_weights
from helpers.problems import CNN, TRANSFORMER, TRANSFORMER_NO_DROPOUT, Problem, grads, relative_error

SEED = Seed(11, 0)


def weigh(weighting: Weighting, model: nn.Module, batch: Any, objective: Any, rho: float) -> Tensor:
    torch.manual_seed(5)
    passes = Passes(model, batch, objective)
    weights = weighting.probe(passes, rho=rho, eta=1e-12, seed=SEED)
    return weights(passes.losses())


def by_hand(model: nn.Module, batch: Any, objective: Any, radius: float) -> Tensor:
    """|r'Hr| / (2 |grad'r|) by autograd's Hessian-vector products, one instance at a time, with the same masks."""
    params = [p for p in model.parameters() if p.requires_grad]
    draws = random_direction(params, SEED.child(0))
    r = [d * radius / global_norm(draws) for d in draws]
    found = []
    for i in range(len(batch[1])):
        torch.manual_seed(5)
        loss = objective(model, batch)[i]
        grad = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        slope = sum((g * v).sum() for g, v in zip(grad, r, strict=True) if g is not None)
        curve = torch.autograd.grad(slope, params, allow_unused=True)
        second = sum((h * v).sum() for h, v in zip(curve, r, strict=True) if h is not None)
        found.append(second.abs() / (2 * slope.abs()))
    return torch.stack(found).detach()


@pytest.mark.parametrize("problem", [TRANSFORMER, CNN], ids=lambda p: p.name)
def test_directional_is_the_hessian_vector_product(problem: Problem) -> None:
    """LayerNorm and BatchNorm included, whose nested forward mode torch gets wrong."""
    model, batch, objective = problem.make()
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivative
        wanted = by_hand(model, batch, objective, 0.05)
    assert torch.allclose(weigh(Directional(), model, batch, objective, 0.05), wanted, rtol=1e-9)


def test_finite_difference_of_a_small_radius_agrees_with_directional() -> None:
    model, batch, objective = TRANSFORMER.make()
    exact = weigh(Directional(radius=1e-3), model, batch, objective, 0.05)
    difference = weigh(FiniteDifference(radius=1e-3), model, batch, objective, 0.05)
    assert torch.allclose(difference, exact, rtol=1e-4)
    coarse = weigh(FiniteDifference(radius=1e-1), model, batch, objective, 0.05)
    assert not torch.allclose(coarse, 100 * exact, rtol=1e-4)  # otherwise the radius is not used


class OneNumber(nn.Module):
    """w . x_i, whose losses below have the rank-one Hessians a_i grad_i grad_i' that the paper assumes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def test_a_view_that_stays_at_w_has_the_masks_of_its_micro_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 6)).double()
    views = [(torch.randn(4, 5).double(), torch.randn(4, 5).double()) for _ in range(3)]
    batch, objective = MicroBatches(views), Contrastive(predict=lambda m, x: m(x))
    near = weigh(FiniteDifference(radius=1e-4), model, batch, objective, 1e-4)
    torch.testing.assert_close(weigh(Directional(), model, batch, objective, 1e-4), near, rtol=1e-3, atol=0)


def test_weights_have_the_ratios_the_paper_derives() -> None:
    """l_i = s_i + a_i s_i^2 / 2 at s_i = 0, s_i = x_i . (w - w0): grad_i = x_i and H_i = a_i x_i x_i'."""
    torch.manual_seed(0)
    model = OneNumber()
    w0 = model.w.detach().clone()
    x, a = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        s = model(x) - x @ w0
        return s + a * s**2 / 2

    wanted = a * x.norm(dim=1)  # g_i = a_i ||grad_i||
    for weighting in (FiniteDifference(samples=300, radius=1e-2), Directional(samples=300)):
        found = weigh(weighting, model, x, objective, 1e-2)
        assert torch.allclose(found / found.sum(), wanted / wanted.sum(), rtol=0.12)
    # a single draw: g_i = (a_i / 2) |grad_i . r|, that is, the wanted weight times half-normal noise
    (r,) = random_direction([model.w], SEED.child(0))
    r = 1e-2 * r / r.norm()
    assert torch.allclose(weigh(FiniteDifference(), model, x, objective, 1e-2), a / 2 * (x @ r).abs(), rtol=1e-6)


def test_directional_works_in_bfloat16_where_differences_do_not() -> None:
    """Derivatives of a bfloat16 model against those of the same weights and the same r in float64."""
    low, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.bfloat16)
    high, _, _ = TRANSFORMER_NO_DROPOUT.make()
    high.load_state_dict({name: value.double() for name, value in low.state_dict().items()})
    passes = Passes(low, batch, lambda m, b: objective(m, b).float())
    params = list(passes.params.values())
    r = dict(zip(passes.params, random_direction(params, SEED), strict=True))
    found = derivatives_along(passes, r)
    wanted = derivatives_along(Passes(high, batch, objective), {name: value.double() for name, value in r.items()})
    for one, exact in zip(found, wanted, strict=True):
        assert (one.double() - exact).norm() < 0.1 * exact.norm()
    with pytest.warns(UserWarning, match="half precision"):
        weigh(FiniteDifference(), low, batch, objective, 0.05)


def test_probes_run_in_float32_under_autocast_with_a_separate_centre() -> None:
    model, batch, objective = TRANSFORMER.make(torch.float32)
    wanted = weigh(FiniteDifference(radius=1.0), model, batch, objective, 0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = weigh(FiniteDifference(radius=1.0), model, batch, objective, 0.05)
        ambient = weigh(FiniteDifference(radius=1.0, precision="ambient"), model, batch, objective, 0.05)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ambient, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_that_decorates_the_forward_is_named(enabled: bool) -> None:
    """As by Accelerate's mixed_precision: nothing around the model can switch it off."""

    class Decorated(nn.Linear):
        forward = torch.autocast("cpu", torch.bfloat16, enabled=enabled)(nn.Linear.forward)

    torch.manual_seed(0)
    model, x = Decorated(3, 1), torch.randn(4, 3)
    with pytest.warns(UserWarning, match="half precision") if enabled else nullcontext():
        weigh(FiniteDifference(), model, x, lambda model, x: model(x).float().squeeze(1) ** 2, 0.05)


def test_several_draws_are_the_expectations_of_the_derivation() -> None:
    center = torch.tensor([1.0, 2.0])
    plus = [torch.tensor([1.5, 2.1]), torch.tensor([1.1, 2.4])]
    minus = [torch.tensor([0.7, 2.0]), torch.tensor([1.2, 1.7])]
    second = [p + m - 2 * center for p, m in zip(plus, minus, strict=True)]
    first = [p - m for p, m in zip(plus, minus, strict=True)]
    wanted = ((second[0] + second[1]) / 2).abs() / ((first[0] ** 2 + first[1] ** 2) / 2).sqrt()
    assert torch.allclose(difference_weights(center, plus, minus, 1e-6), wanted)


def test_the_loss_as_a_weight() -> None:
    model, batch, objective = TRANSFORMER.make()
    model.eval()
    losses = objective(model, batch)
    found = weigh(LossWeights(), model, batch, objective, 0.05)
    torch.testing.assert_close(found, losses.detach())
    below = weigh(LossWeights(), model, batch, lambda model, batch: objective(model, batch) - losses.mean(), 0.05)
    torch.testing.assert_close(below, (losses - losses.mean()).detach().clamp(min=0))
    assert (below == 0).any()


def test_uniform_and_random() -> None:
    model, batch, objective = TRANSFORMER.make()
    assert torch.equal(weigh(Uniform(), model, batch, objective, 0.05), torch.ones(5, dtype=torch.float64))
    real = weigh(FiniteDifference(), model, batch, objective, 0.05)
    shuffled = weigh(RandomWeights(), model, batch, objective, 0.05)
    assert torch.equal(real.sort().values, shuffled.sort().values)
    assert not torch.equal(real, shuffled)


@pytest.mark.parametrize("cls", [FiniteDifference, Directional])
@pytest.mark.parametrize(
    ("option", "values"), [("samples", [0, 1.5, True]), ("radius", [0.0, -1.0, float("inf"), float("nan")])]
)
def test_bad_options(cls: type[Weighting], option: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{option}={value}"):
            cls(**{option: value})


def test_options_of_a_wrong_type() -> None:
    for cls in (FiniteDifference, Directional, OwnGradient):
        with pytest.raises(ValueError, match=r"radius='0.1'"):
            cls(radius="0.1")
    with pytest.raises(TypeError, match=r"of='uniform' must be a Weighting"):
        RandomWeights(of="uniform")


floats = st.floats(-1e6, 1e6, width=32)


@given(st.lists(st.tuples(floats, floats, floats), min_size=1, max_size=12), st.floats(1e-6, 1.0), st.randoms())
def test_weights_are_finite_nonnegative_and_follow_the_batch(rows: list[Any], eta: float, rng: Any) -> None:
    values = torch.tensor(rows, dtype=torch.float32)
    a, b, c = values.T
    g = usable(difference_weights(a, [b], [c], eta))
    assert torch.isfinite(g).all()
    assert (g >= 0).all()
    assert g.sum() > 0
    order = list(range(len(rows)))
    rng.shuffle(order)
    assert torch.equal(usable(difference_weights(a[order], [b[order]], [c[order]], eta)), g[order])


@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=12), st.floats(1e-6, 1.0))
def test_all_zero_differences_fall_back_to_uniform(losses: list[float], eta: float) -> None:
    a = torch.tensor(losses)
    assert torch.equal(usable(difference_weights(a, [a], [a], eta)), torch.ones_like(a))


@given(st.lists(st.sampled_from([float("nan"), float("inf"), 1.0]), min_size=1, max_size=5))
def test_losses_that_are_not_finite_fall_back_to_uniform(losses: list[float]) -> None:
    a = torch.tensor(losses)
    weights = usable(difference_weights(a, [a + 1], [a - 2], 1e-4))
    if not torch.isfinite(a).all():
        assert torch.equal(weights, torch.ones_like(a))


def test_the_probe_at_w_minus_r_under_autocast() -> None:
    """Autocast caches its casts of the weights; with a stale one the probe at w - r would be at w + r."""
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.float32)
    params = [p for p in model.parameters() if p.requires_grad]
    draws = random_direction(params, SEED.child(0))
    r = [d / global_norm(draws) for d in draws]
    at = []
    for sign in (0.0, 1.0, -1.0):
        moved, _, _ = TRANSFORMER_NO_DROPOUT.make(torch.float32)
        with torch.no_grad():
            torch._foreach_add_([p for p in moved.parameters() if p.requires_grad], r, alpha=sign)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            at.append(objective(moved, batch).detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = weigh(FiniteDifference(radius=1.0, precision="ambient"), model, batch, objective, 0.05)
    wanted = difference_weights(at[0], [at[1]], [at[2]], 1e-12)
    assert (at[1] - at[2]).abs().min() > 0.01
    torch.testing.assert_close(found, wanted, rtol=0.2, atol=0.02)


@dataclass(frozen=True, kw_only=True)
class Given(Weighting):
    """Weights that are all the same."""

    value: float

    def probe(self, passes: Passes, *, rho: float, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        return lambda losses: torch.full_like(losses, self.value)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e-30, 1e30])
def test_weights_are_divided_by_their_mean_and_unusable_ones_are_uniform(value: float) -> None:
    """The gradient of the ascent has the magnitude of SAM's, whatever that of the weights, as float16 needs it."""
    results = []
    for method in (DeltaSAM(rho=0.1, weighting=Given(value=value)), SAM(rho=0.1)):
        model, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.float32)
        results.append((method.backward(model, batch, objective), grads(model)))
    (weighted, found), (plain, wanted) = results
    assert not weighted.skipped
    torch.testing.assert_close(weighted.grad_norm, plain.grad_norm, rtol=1e-5, atol=0)
    assert relative_error(found, wanted) < 1e-5


def test_several_derivatives_are_the_expectations_of_the_derivation() -> None:
    """As for differences: the absolute mean of the second ones over the root mean square of the first."""
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    passes = Passes(model, batch, objective)
    found = []
    for draw in range(3):
        r = random_direction(list(passes.params.values()), SEED.child(draw))
        r = [0.05 * d / global_norm(r) for d in r]
        found.append(derivatives_along(passes, dict(zip(passes.params, r, strict=True))))
    first, second = (torch.stack(values) for values in zip(*found, strict=True))
    assert (second.sign().sum(0).abs() < 3).any()  # otherwise the order of mean and absolute value would not matter
    wanted = second.mean(0).abs() / (2 * first.square().mean(0).sqrt())
    torch.testing.assert_close(weigh(Directional(samples=3), model, batch, objective, 0.05), wanted, rtol=1e-9, atol=0)
