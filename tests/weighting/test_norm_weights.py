"""Weights by gradient norms: exact ones against autograd, estimates against their expectation, and the softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import RWSAM, DeltaSAM, MicroBatches, NormWeights, Tokens
from deltasam.per_instance import InstancesMixedError
from deltasam.step.passes import Passes
from deltasam.step.randomness import Seed
from helpers.problems import CNN, TRANSFORMER_NO_DROPOUT, grads, relative_error

SEED = Seed(11, 0)


def weigh(weighting: NormWeights, model: nn.Module, batch: Any, objective: Any, **options: Any) -> Tensor:
    passes = Passes(model, batch, objective, **options)
    weights = weighting.probe(passes, rho=0.05, eta=1e-12, seed=SEED)
    return weights(passes.losses())


def norms_by_hand(model: nn.Module, batch: Any, objective: Any) -> Tensor:
    found = []
    for i in range(objective(model, batch).shape[0]):
        model.zero_grad()
        objective(model, batch)[i].backward()
        found.append(torch.sqrt(sum((g**2).sum() for g in grads(model).values())))
    model.zero_grad()
    return torch.stack(found)


def softmax(norms: Tensor, lam: float) -> Tensor:
    powers = torch.exp(lam * norms / norms.mean())
    return powers / powers.sum()


@pytest.mark.parametrize("lam", [0.0, 0.5, 3.0])
def test_exact_norms(lam: float) -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    g = weigh(NormWeights(lam=lam, norms="exact"), model, batch, objective)
    torch.testing.assert_close(g / g.sum(), softmax(norms_by_hand(model, batch, objective), lam))


class Recurrent(nn.Module):
    """Not covered by the low-rank engine."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1]).squeeze(-1)


def test_the_loop_for_models_that_are_not_covered() -> None:
    torch.manual_seed(0)
    model, x = Recurrent().double(), torch.randn(4, 5, 3).double()

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - 1) ** 2

    with pytest.warns(UserWarning, match="one after the other"):
        g = weigh(NormWeights(norms="exact"), model, x, objective, scale=64.0)
    torch.testing.assert_close(g / g.sum(), softmax(norms_by_hand(model, x, objective), 1.0))


def test_batch_norm_is_refused_by_exact_norms_only() -> None:
    model, batch, objective = CNN.make()
    with pytest.raises(InstancesMixedError):
        weigh(NormWeights(norms="exact"), model, batch, objective)
    assert weigh(NormWeights(), model, batch, objective).shape == (5,)


def test_estimates_approach_the_norms() -> None:
    """The root of the mean square over many directions; with one of them the weights are far off."""
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    norms = norms_by_hand(model, batch, objective)

    def estimated(samples: int) -> Tensor:
        g = weigh(NormWeights(lam=1.0, samples=samples, radius=1e-5), model, batch, objective).log()
        return g - g.mean() + 1  # the exponents: n / mean(n), whose mean is 1

    wanted = norms / norms.mean()
    assert (estimated(600) - wanted).abs().max() < 0.1
    assert (estimated(1) - wanted).abs().max() > 0.1


@pytest.mark.parametrize("norms", ["exact", "finite-difference"])
def test_the_scale_of_the_loss_does_not_matter(norms: Any) -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    weighting = NormWeights(norms=norms)
    wanted = weigh(weighting, model, batch, objective)
    found = weigh(weighting, model, batch, lambda model, batch: 1e4 * objective(model, batch))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_nothing_overflows() -> None:
    """Exponents up to 4,000 in float32: without a shift all weights would be replaced by uniform ones."""
    model = nn.Linear(1, 1, bias=False)
    x = torch.tensor([[1.0], [2.0], [5.0]])
    step = DeltaSAM(weighting=NormWeights(lam=2000.0, norms="exact")).backward(model, x, lambda m, x: m(x).squeeze(1))
    assert step.weights.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("norms", ["exact", "finite-difference"])
def test_gradients_of_zero_give_uniform_weights(norms: Any) -> None:
    model, x = nn.Linear(2, 1), torch.rand(3, 2)
    step = DeltaSAM(weighting=NormWeights(norms=norms)).backward(model, x, lambda m, x: 0 * m(x).squeeze(1))
    assert step.weights.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("norms", ["exact", "finite-difference"])
def test_micro_batches_with_a_mean_over_tokens(norms: Any) -> None:
    """The micro-batches have different numbers of tokens, which divide the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double()
    ids, labels = torch.randint(7, (4, 5)), torch.randint(3, (4, 5))
    labels[1:, 2:] = -100
    parts = MicroBatches([(ids[:1], labels[:1]), (ids[1:], labels[1:])])
    whole, split = (weigh(NormWeights(norms=norms), model, batch, Tokens()) for batch in ((ids, labels), parts))
    torch.testing.assert_close(split, whole, rtol=1e-6, atol=0)


def test_half_precision_is_warned_of() -> None:
    model, x = nn.Linear(2, 1).bfloat16(), torch.rand(3, 2).bfloat16()
    with pytest.warns(UserWarning, match=r"the weights are torch.bfloat16.*norms='exact'"):
        weigh(NormWeights(), model, x, lambda m, x: m(x).squeeze(1).float())


def test_under_autocast_the_probes_are_in_float32() -> None:
    found = []
    for enabled in (False, True):
        model, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            step = DeltaSAM(weighting=NormWeights()).backward(model, batch, objective)
        assert step.forwards == 3 + enabled  # the losses at w again
        found.append(step.weights)
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": -1.0}, "lam=-1.0"),
        ({"norms": "approximate"}, "norms='approximate' must be one of 'exact', 'finite-difference'"),
        ({"samples": 0}, "samples=0"),
        ({"radius": 0.0}, "radius=0.0"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NormWeights(**options)


def test_the_step_is_that_of_the_method() -> None:
    found = []
    for method in (RWSAM(lam=2.0, samples=2, seed=3), DeltaSAM(weighting=NormWeights(lam=2.0, samples=2), seed=3)):
        model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
        method.backward(model, batch, objective)
        found.append(grads(model))
    assert relative_error(*found) == 0
