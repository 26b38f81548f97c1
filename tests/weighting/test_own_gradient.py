"""The weights along each instance's own gradient, against derivatives taken one instance at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deltasam import DeltaSAM, MicroBatches
from deltasam.objectives import Classification, Tokens
from deltasam.weighting import OwnGradient
from helpers.architectures import BY_NAME, make
from helpers.problems import TRANSFORMER_NO_DROPOUT, relative_error
from helpers.random_models import cross_entropies, noisy


def curvature(model: nn.Module, batch: object, objective: object, i: int) -> tuple[Tensor, Tensor]:
    """u^T H u along the instance's gradient, and the norm of the gradient."""
    params = [p for p in model.parameters() if p.requires_grad]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        grads = torch.autograd.grad(objective(model, batch)[i], params, create_graph=True, allow_unused=True)
    pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    norm = torch.stack([g.norm() for _, g in pairs]).norm().detach()
    slope = sum((g * (g.detach() / norm)).sum() for _, g in pairs)
    second = torch.autograd.grad(slope, [p for p, _ in pairs])
    return sum((h * (g.detach() / norm)).sum() for h, (_, g) in zip(second, pairs, strict=True)), norm


def test_weights_are_curvature_over_norm() -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    wanted = torch.stack([torch.stack(curvature(model, batch, objective, i)) for i in range(5)])
    exact = 0.5e-3 * wanted[:, 0].abs() / wanted[:, 1]
    step = DeltaSAM(eta=1e-12, weighting=OwnGradient(radius=1e-3)).backward(model, batch, objective)
    assert torch.allclose(step.weights, exact, rtol=1e-2)


def test_gaussian_model_by_hand() -> None:
    """l_i = (w x_i)^2 / 2: gradient (w x) x, Hessian x^2, so a ||grad|| = x^2 / |w x^2|."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 2.0)
    x = torch.tensor([[1.0], [2.0], [5.0]]).double()
    step = DeltaSAM(rho=0.1, weighting=OwnGradient()).backward(model, x, lambda m, x: m(x).squeeze(1).square() / 2)
    assert torch.allclose(step.weights, torch.full((3,), 0.1 / 2 / 2.0).double())


def test_micro_batches_do_not_change_the_weights() -> None:
    model, (inputs, labels), objective = TRANSFORMER_NO_DROPOUT.make(size=4)
    whole = DeltaSAM(weighting=OwnGradient()).backward(model, (inputs, labels), objective)
    parts = MicroBatches([(inputs[:1], labels[:1]), (inputs[1:], labels[1:])])
    split = DeltaSAM(weighting=OwnGradient()).backward(model, parts, objective)
    assert torch.allclose(whole.weights, split.weights, rtol=1e-6)


def test_micro_batches_with_a_mean_over_tokens_and_a_floor() -> None:
    """Each micro-batch divides its losses by its own number of tokens; eta is in the unit of the whole batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double()
    ids, labels = torch.randint(7, (4, 5)), torch.randint(3, (4, 5))
    labels[1:, 2:] = -100
    parts = MicroBatches([(ids[:1], labels[:1]), (ids[1:], labels[1:])])
    method = DeltaSAM(eta=5.0, weighting=OwnGradient(radius=0.1))
    whole, split = (method.backward(model, batch, Tokens()).weights for batch in ((ids, labels), parts))
    torch.testing.assert_close(split, whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": 0.0}, "radius=0.0"),
        ({"radius": float("inf")}, "radius=inf"),
        ({"precision": "bf16"}, "precision='bf16'"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OwnGradient(**options)


def test_unlike_one_random_direction_it_does_not_depend_on_the_seed() -> None:
    results = []
    for seed in (0, 1):
        model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
        DeltaSAM(weighting=OwnGradient(), seed=seed).backward(model, batch, objective)
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert relative_error(*results) == 0


def test_micro_batches_are_probed_with_the_masks_they_are_trained_with() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 1))
    x, seen = torch.randn(8, 6), []

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        losses = model(x).squeeze(-1) ** 2
        seen.append(losses.detach().clone())
        return losses

    DeltaSAM(weighting=OwnGradient()).backward(model, MicroBatches([x[:4], x[4:]]), objective)
    probes, trained = seen[:-6], seen[-4:-2]  # between them are all losses at w, after them those at w + eps
    assert all(any(torch.equal(losses, one) for one in probes) for losses in trained)


def test_a_small_gradient_is_clamped_to_eta() -> None:
    """Below eta the weight is the second difference over eta: l = (w x)^2 / 2 has (h x)^2 for any w."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 1e-3)
    x = torch.tensor([[1.0], [2.0], [5.0]]).double()
    weighting = OwnGradient(radius=0.1)
    step = DeltaSAM(eta=10.0, weighting=weighting).backward(model, x, lambda m, x: m(x).squeeze(1).square() / 2)
    torch.testing.assert_close(step.weights, (0.1 * x.squeeze(1)).square() / 10, rtol=1e-9, atol=0)


def test_a_model_that_no_rule_covers_runs_one_instance_at_a_time() -> None:
    architecture = BY_NAME["LSTM tagger"]
    model, _, batch = make(architecture, 5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return architecture.losses(model, batch)

    wanted = torch.stack([torch.stack(curvature(model, batch, objective, i)) for i in range(5)])
    method = DeltaSAM(eta=1e-12, weighting=OwnGradient(radius=1e-3))
    with pytest.warns(UserWarning, match=r"lstm.*LSTM.*one after the other"):
        step = method.backward(model, batch, objective)
    torch.testing.assert_close(step.weights, 0.5e-3 * wanted[:, 0].abs() / wanted[:, 1], rtol=1e-2, atol=0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    # The losses at w, a gradient and a pass on each side of every instance; the step's own two.
    assert (step.forwards, step.backwards) == (1 + 3 * 5 + 2, 5 + 2)


@pytest.mark.filterwarnings("ignore:.*one after the other")
@pytest.mark.parametrize("parts", [1, 2])
def test_in_the_loop_eta_is_in_the_unit_of_the_loss_at_any_scale(parts: int) -> None:
    architecture = BY_NAME["LSTM tagger"]
    model, _, batch = make(architecture, 4)
    cut = MicroBatches([{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 1), slice(1, 4))])

    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return architecture.losses(model, batch)

    method = DeltaSAM(eta=0.05, weighting=OwnGradient(radius=1e-3))  # above 2 h ||grad||
    found = [
        method.backward(model, batch if parts == 1 else cut, objective, scale=scale).weights
        for scale in (1.0, 2.0**16)
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:.*(draws random numbers|one after the other)")
@pytest.mark.parametrize("parts", [1, 2])
def test_the_loop_compares_losses_with_the_same_masks(parts: int) -> None:
    """With other masks the difference of the losses is dropout noise, divided by the square of a small radius."""
    found = []
    for objective in (Classification(), cross_entropies):
        model, (x, labels) = noisy()
        batch = MicroBatches(zip(x.chunk(parts), labels.chunk(parts), strict=True)) if parts > 1 else (x, labels)
        method = DeltaSAM(eta=1e-12, weighting=OwnGradient(radius=1e-3))
        found.append(method.backward(model, batch, objective).weights)
    assert bool((found[0] < 1).all())
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)
