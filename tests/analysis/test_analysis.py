"""Analyses against slow, obvious computations; the model is unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deltasam.analysis import WEIGHTINGS, adversarial_risk, alignment, sharpness, weights_quality
from deltasam.analysis._common import _number, cosine, gradient_of, spearman
from deltasam.methods import ERM, SAM, DeltaSAM, PerInstanceSAM
from deltasam.objectives import Classification
from deltasam.weighting import FiniteDifference, OwnGradient, Uniform
from helpers.instance_reference import ascended, loop
from helpers.problems import TRANSFORMER, TRANSFORMER_NO_DROPOUT
from helpers.random_models import cross_entropies, noisy


def snapshot(model: nn.Module) -> list[object]:
    return [
        [p.detach().clone() for p in model.parameters()],
        [m.training for m in model.modules()],
        torch.get_rng_state(),
    ]


def assert_untouched(model: nn.Module, before: list[object]) -> None:
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before[0], strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert [m.training for m in model.modules()] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def two_batches() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], object]:
    model, (inputs, labels), objective = TRANSFORMER.make(size=5)
    return model, [(inputs[:3], labels[:3]), (inputs[3:], labels[3:])], objective


@pytest.mark.parametrize("engine", ["low-rank", "loop"])
def test_adversarial_risk_is_the_mean_over_instances(engine: str) -> None:
    model, data, objective = two_batches()
    before = snapshot(model)
    risk = adversarial_risk(model, data, objective, rho=0.1, engine=engine)
    assert_untouched(model, before)
    model.eval()
    exact = [loop(model, lambda batch=batch: objective(model, batch), 0.1) for batch in data]
    assert torch.allclose(risk.adversarial_losses, torch.cat([e.perturbed for e in exact]), rtol=1e-9)
    assert float(risk) == pytest.approx(float(torch.cat([e.perturbed for e in exact]).mean()), rel=1e-9)
    assert risk.clean == pytest.approx(float(torch.cat([e.losses for e in exact]).mean()), rel=1e-9)
    assert torch.allclose(risk.norms, torch.cat([e.norms for e in exact]), rtol=1e-9)


def test_layers_that_merge_their_adapters_in_eval_stay_as_they_are() -> None:
    """As those of loralib: merged weights would train no adapter afterwards."""

    class Merging(nn.Linear):
        merged = False

        def train(self, mode: bool = True) -> Merging:
            self.merged = not mode
            return super().train(mode)

    torch.manual_seed(0)
    model = Merging(4, 3)
    adversarial_risk(model, [(torch.randn(2, 4), torch.tensor([0, 1]))], Classification(), rho=0.1)
    assert model.training
    assert not model.merged


@pytest.mark.filterwarnings("ignore:.*(draws random numbers|one after the other)")
def test_in_train_mode_the_loop_has_the_masks_of_the_pass_at_w() -> None:
    model, batch = noisy()
    risk = adversarial_risk(model, [batch], Classification(), rho=1e-12, training=True)
    torch.testing.assert_close(risk.adversarial_losses, risk.losses, rtol=0, atol=1e-9)
    found = sharpness(model, [batch], Classification(), rho=1e-12, training=True)
    assert found.instance == pytest.approx(found.first_order, abs=1e-14)
    cosines = []
    for objective in (Classification(), cross_entropies):
        torch.manual_seed(0)
        rows = alignment(model, [batch], objective, rho=0.05, training=True, methods={"SAM": SAM(rho=0.05)})
        cosines.append(rows[1].regulariser)
    assert cosines[0] == pytest.approx(cosines[1], abs=1e-9)


def test_instances_of_a_group_share_their_perturbation() -> None:
    model, data, objective = two_batches()
    risk = adversarial_risk(model, data, objective, rho=0.1, group=2)
    model.eval()
    exact = [loop(model, lambda batch=batch: objective(model, batch), 0.1, group=2) for batch in data]
    assert torch.allclose(risk.adversarial_losses, torch.cat([e.perturbed for e in exact]), rtol=1e-9)
    assert risk.norms.shape == (3,)  # batches of 3 and 2: two groups and one


def test_more_steps_do_not_lower_the_risk() -> None:
    model, data, objective = two_batches()
    risks = [float(adversarial_risk(model, data, objective, rho=0.3, steps=k)) for k in (1, 4)]
    assert risks[1] > risks[0]


def test_limit_progress_and_empty_data(capsys: pytest.CaptureFixture[str]) -> None:
    model, data, objective = two_batches()
    risk = adversarial_risk(model, data, objective, limit=1, progress=True)
    assert risk.losses.shape == (3,)
    adversarial_risk(model, data, objective)  # no terminal, no bar
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="data is empty"):
        adversarial_risk(model, [], objective)


def test_sharpness_of_instances_is_not_below_that_of_batches() -> None:
    model, data, objective = two_batches()
    before = snapshot(model)
    found = sharpness(model, data, objective, rho=0.02, steps=3)
    assert_untouched(model, before)
    assert found.ordered == 1.0
    assert found.instance > found.batch > 0
    small = sharpness(model, data, objective, rho=1e-5)
    assert small.instance == pytest.approx(small.first_order, rel=1e-3)


def test_batch_sharpness_is_what_sam_measures() -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    found = sharpness(model, [batch], objective, rho=0.05)
    step = SAM(rho=0.05).backward(model.eval(), batch, objective)
    assert found.batch == pytest.approx(float(step.sharpness), rel=1e-9)


@pytest.mark.parametrize("steps", [1, 3])
def test_both_sharpness_measures_use_the_number_of_steps(steps: int) -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make(size=4)
    found = sharpness(model, [batch], objective, rho=0.3, steps=steps)
    model.eval()

    def run() -> Tensor:
        return objective(model, batch)

    clean = run().detach().mean()
    stride = 0.3 if steps == 1 else 2 * 0.3 / steps
    for value, groups in ((found.batch, [[0, 1, 2, 3]]), (found.instance, [[0], [1], [2], [3]])):
        worst = torch.cat([ascended(model, run, 0.3, steps, stride, members) for members in groups])
        assert value == pytest.approx(float(worst.mean() - clean), rel=1e-9)


def test_alignment() -> None:
    model, data, objective = two_batches()
    before = snapshot(model)
    uniform = {**WEIGHTINGS, "Uniform": Uniform()}
    found = alignment(model, data, objective, rho=0.02, training=True, weightings=uniform)
    rows = {row.method: row for row in found}
    assert_untouched(model, before)
    assert rows["PerInstanceSAM"].regulariser == pytest.approx(1.0)
    assert rows["PerInstanceSAM"].update == pytest.approx(1.0)
    assert rows["SAM"].regulariser == pytest.approx(rows["DeltaSAM Uniform"].regulariser, rel=1e-6)
    assert 0 < rows["SAM"].regulariser < 1
    assert all(row.batches == 2 and -1 <= row.regulariser <= 1.0000001 for row in rows.values())
    assert "DeltaSAM Uniform" not in {row.method for row in alignment(model, data, objective, limit=1)}


def test_alignment_is_the_cosine_with_the_loop_over_instances() -> None:
    model, data, objective = two_batches()
    rows = {row.method: row for row in alignment(model, data, objective, rho=0.02, weightings={"Own": OwnGradient()})}
    model.eval()
    for number, batch in enumerate(data):
        plain = gradient_of(ERM(), model, batch, objective)
        exact = gradient_of(PerInstanceSAM(rho=0.02, engine="loop"), model, batch, objective)
        for name, method in (("SAM", SAM(rho=0.02)), ("DeltaSAM Own", DeltaSAM(rho=0.02, weighting=OwnGradient()))):
            own = gradient_of(method, model, batch, objective)
            expected = [float(cosine(own - plain, exact - plain)), float(cosine(own, exact))]
            found = [rows[name].by_batch[key][number] for key in ("regulariser", "update")]
            assert found == pytest.approx(expected, rel=1e-6)
    assert rows["SAM"].regulariser == pytest.approx(sum(rows["SAM"].by_batch["regulariser"]) / 2)


def test_every_batch_has_its_direction_and_weightings_share_it() -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    both = {"one": FiniteDifference(), "other": FiniteDifference()}
    rows = {row.method: row for row in alignment(model, [batch, batch], objective, weightings=both)}
    first, second = rows["DeltaSAM one"].by_batch["regulariser"]
    assert first != second
    assert rows["DeltaSAM other"].by_batch["regulariser"] == (first, second)


def test_theory_holds_where_its_assumption_does() -> None:
    """With H_i = a_i grad_i grad_i^T (one weight vector) OwnGradient's weights align better than SAM's."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1).double()
    x = torch.randn(8, 6).double() * torch.logspace(-1, 1, 8).double().unsqueeze(1)

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.softplus(model(x).squeeze(1) * 2)

    rows = {row.method: row for row in alignment(model, [x], objective, rho=1e-4, eta=1e-12)}
    assert rows["DeltaSAM OwnGradient"].regulariser > rows["SAM"].regulariser
    assert rows["DeltaSAM OwnGradient"].regulariser > 0.7


@pytest.mark.parametrize("analysis", [adversarial_risk, sharpness, alignment, weights_quality])
@pytest.mark.parametrize("rho", [-0.05, float("nan"), float("inf")])
def test_a_bad_radius(analysis: Callable[..., object], rho: float) -> None:
    model, data, objective = two_batches()
    with pytest.raises(ValueError, match=f"rho={rho} "):
        analysis(model, data, objective, rho=rho)


def test_bad_numbers() -> None:
    model, data, objective = two_batches()
    assert float(adversarial_risk(model, data, objective, rho=0)) == adversarial_risk(model, data, objective).clean
    for analysis in (alignment, weights_quality):
        with pytest.raises(ValueError, match="rho=0 "):
            analysis(model, data, objective, rho=0)
        with pytest.raises(ValueError, match="eta=0 "):
            analysis(model, data, objective, eta=0)
    for rising in (adversarial_risk, sharpness):
        with pytest.raises(ValueError, match="steps=0 "):
            rising(model, data, objective, steps=0)


def test_a_bar_knows_how_many_batches_there_will_be() -> None:
    assert _number(range(10), 3) == _number(range(3), 10) == _number(range(3), None) == 3
    assert _number(iter(range(10)), 3) == 3
    assert _number(iter(range(10)), None) is None


def test_helpers() -> None:
    assert spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])) == -1.0
    assert float(cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]))) == pytest.approx(0.5**0.5)
    long = torch.full((2**23 + 5,), 0.1)
    assert float(cosine(long, long)) == pytest.approx(1.0, abs=1e-12)  # float32 sums do not give this
    assert cosine(long, torch.zeros_like(long)).isnan()
    tied = spearman(torch.tensor([1.0, 1.0, 2.0, 3.0]), torch.tensor([5.0, 5.0, 7.0, 6.0]))
    assert tied == pytest.approx(7 / 9)  # mean ranks, as in scipy.stats.spearmanr
    for lost in (torch.nan, torch.inf):  # with such weights the step falls back to uniform ones, which have no order
        assert math.isnan(spearman(torch.tensor([1.0, lost, 3.0, 2.0]), torch.arange(4.0)))
        assert math.isnan(spearman(torch.arange(4.0), torch.tensor([1.0, lost, 3.0, 2.0])))
