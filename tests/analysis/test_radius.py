"""A suggested radius raises the measured loss by the share that was asked for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from deltasam import ASAM, ERM, SAM, PerInstanceSAM, RandomPerturbation
from deltasam.analysis import RadiusSuggestion, suggest_radius
from deltasam.objectives import Classification
from helpers.instance_reference import loop
from helpers.problems import TRANSFORMER, TRANSFORMER_NO_DROPOUT
from helpers.random_models import cross_entropies, noisy


def linear(start: list[float]) -> nn.Module:
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([start]))
    return model


def output(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1)


ROWS = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]], dtype=torch.float64)


def test_a_linear_loss_has_the_first_order_radius() -> None:
    model = linear([1.0, 2.0])
    batches = [ROWS, 2 * ROWS[:2]]
    found = suggest_radius(model, batches, output, share=0.1)
    expected = [0.1 * float(output(model, x).detach().mean()) / float(x.mean(0).norm()) for x in batches]
    assert found.radii.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.rho == float(found) == pytest.approx(sum(expected) / 2)
    assert found.loss == pytest.approx(sum(float(output(model, x).detach().mean()) for x in batches) / 2)
    assert found.grad_norm == pytest.approx(sum(float(x.mean(0).norm()) for x in batches) / 2)
    each = suggest_radius(model, batches, output, share=0.1, method=PerInstanceSAM())
    rows = torch.cat(batches)
    assert torch.allclose(each.radii, 0.1 * output(model, rows) / rows.norm(dim=1), rtol=1e-12)
    assert each.low == pytest.approx(float(each.radii.quantile(0.25)))
    assert each.high == pytest.approx(float(each.radii.quantile(0.75)))


@pytest.mark.parametrize("engine", ["low-rank", "loop"])
@pytest.mark.parametrize("share", [0.02, 1.0, 30.0])
def test_a_quadratic_loss_is_solved(share: float, engine: str) -> None:
    model = linear([1.0, 2.0])

    def square(model: nn.Module, x: Tensor) -> Tensor:
        return output(model, x) ** 2

    found = suggest_radius(model, [ROWS], square, share=share, method=PerInstanceSAM(engine=engine))
    # (x w + rho |x|)^2 = (1 + share) (x w)^2
    exact = (math.sqrt(1 + share) - 1) * output(model, ROWS) / ROWS.norm(dim=1)
    assert torch.allclose(found.radii, exact, rtol=2e-3)
    assert not torch.allclose(found.radii, share * output(model, ROWS) / (2 * ROWS.norm(dim=1)), rtol=4e-3)


@pytest.mark.parametrize("group", [None, 1, 2])
def test_the_measured_loss_of_a_transformer_rises_by_the_share(group: int | None) -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make(size=5)
    method = SAM() if group is None else PerInstanceSAM(group=group)
    found = suggest_radius(model, [batch], objective, share=0.3, method=method)
    assert found.radii.shape == ((1,) if group is None else (5,) if group == 1 else (3,))
    size = group or 5
    for k, rho in enumerate(found.radii.tolist()):
        exact = loop(model, lambda: objective(model, batch), rho, group=size)
        members = slice(k * size, (k + 1) * size)
        before, after = exact.losses[members].mean(), exact.perturbed[members].mean()
        assert float(after / before) == pytest.approx(1.3, abs=0.3 * 2e-3)


@pytest.mark.filterwarnings("ignore:.*draws random numbers")
def test_instances_are_measured_with_the_masks_of_their_batch() -> None:
    found = []
    for objective in (Classification(), cross_entropies):
        model, batch = noisy()
        found.append(suggest_radius(model, [batch], objective, share=0.1, method=PerInstanceSAM(engine="loop")))
    torch.testing.assert_close(found[0].radii, found[1].radii)


@pytest.mark.parametrize("method", [None, PerInstanceSAM(), PerInstanceSAM(engine="loop")])
@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes(method: PerInstanceSAM | None, training: bool) -> None:
    model, batch, objective = TRANSFORMER.make(size=4)
    model.train(training)
    next(model.children()).eval()  # modes may differ between modules
    modes, weights = [m.training for m in model.modules()], [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    one, other = (suggest_radius(model, [batch], objective, method=method) for _ in range(2))
    assert torch.equal(one.radii, other.radii)  # the same masks
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_the_mode_and_the_parameters_matter() -> None:
    model, batch, objective = TRANSFORMER.make(size=4)
    names = [name for name, _ in model.named_parameters()]

    def radius(**options: object) -> RadiusSuggestion:
        return suggest_radius(model, [batch], objective, **options)

    with_masks = radius()
    model.eval()
    assert float(with_masks) != float(radius())
    first = lambda name, p: name == names[0]  # noqa: E731
    assert float(radius(params=first)) > float(radius())
    assert float(radius(method=SAM(params=first))) == float(radius(params=first))


def test_instances_without_a_radius_are_left_out() -> None:
    model = linear([1.0, 2.0])
    rows = torch.cat([ROWS, torch.zeros(1, 2, dtype=torch.float64), -ROWS[:1]])  # no gradient; a negative loss
    found = suggest_radius(model, [rows], output, method=PerInstanceSAM())
    assert torch.isnan(found.radii).tolist() == [False, False, False, True, True]
    assert found.rho == float(found.radii[:3].median())

    def bounded(model: nn.Module, x: Tensor) -> Tensor:
        return torch.sigmoid(output(model, x))

    with pytest.raises(ValueError, match="no loss rises by share=50 of itself along its gradient"):
        suggest_radius(model, [ROWS], bounded, share=50)


def test_what_is_refused() -> None:
    model = linear([1.0, 2.0])
    with pytest.raises(ValueError, match="data is empty: pass an iterable of batches"):
        suggest_radius(model, [], output)
    for share in (0, -0.1, math.nan):
        with pytest.raises(ValueError, match="share="):
            suggest_radius(model, [ROWS], output, share=share)
    for method in (ASAM(), ERM(), RandomPerturbation()):
        with pytest.raises(ValueError, match=f"method={type(method).__name__}: its radius is not a distance along"):
            suggest_radius(model, [ROWS], output, method=method)
    with pytest.raises(TypeError, match=r"method=0\.05 must be a method such as SAM"):
        suggest_radius(model, [ROWS], output, method=0.05)
