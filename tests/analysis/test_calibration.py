"""Calibration against a loop over the bins and the instances, and against scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from deltasam.analysis import calibration, temperature, temperature_scaled


def obvious_ece(probabilities: list[list[float]], labels: list[int], bins: int) -> float:
    total = 0.0
    for b in range(bins):
        inside = [i for i, p in enumerate(probabilities) if b / bins < max(p) <= (b + 1) / bins]
        right = sum(probabilities[i].index(max(probabilities[i])) == labels[i] for i in inside)
        total += abs(right - sum(max(probabilities[i]) for i in inside))
    return total / len(labels)


@pytest.mark.parametrize(("classes", "bins"), [(2, 15), (3, 15), (5, 4), (2, 1)])
def test_against_a_loop_and_scikit_learn(classes: int, bins: int) -> None:
    logits, labels = 3 * torch.randn(200, classes), torch.randint(classes, (200,))
    p = logits.double().softmax(-1)
    found = calibration(logits, labels, bins=bins)
    assert found.ece == pytest.approx(obvious_ece(p.tolist(), labels.tolist(), bins), abs=1e-12)
    assert found.accuracy == pytest.approx(sk.accuracy_score(labels, p.argmax(-1)))
    assert found.nll == pytest.approx(sk.log_loss(labels, p.numpy(), labels=list(range(classes))))
    one_hot = torch.eye(classes, dtype=torch.float64)[labels]
    assert found.brier == pytest.approx(float(((p - one_hot) ** 2).sum() / 200))


def test_bins_add_up_to_the_error() -> None:
    logits, labels = torch.randn(100, 4), torch.randint(4, (100,))
    found = calibration(logits, labels)
    assert len(found.bins) == 15
    assert sum(b.count for b in found.bins) == 100
    assert sum(b.count * abs(b.accuracy - b.confidence) for b in found.bins) / 100 == pytest.approx(found.ece)
    assert all(b.lower < b.confidence <= b.upper for b in found.bins if b.count)


def test_certain_predictions_are_in_the_last_bin() -> None:
    found = calibration(torch.tensor([[0.0, -1e4], [0.0, -1e4]]), torch.tensor([0, 0]))
    assert (found.ece, found.accuracy, found.nll) == (0, 1, 0)
    assert found.bins[-1].count == 2


def test_log_probabilities_and_logits_agree() -> None:
    logits, labels = torch.randn(50, 3), torch.randint(3, (50,))
    assert calibration(logits.log_softmax(-1), labels).ece == pytest.approx(calibration(logits, labels).ece, abs=1e-6)
    assert math.isclose(calibration(logits.bfloat16(), labels).nll, calibration(logits, labels).nll, rel_tol=0.02)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), "shape"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.long), "shape"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), "at least one"),
        (torch.zeros(1, 2), torch.tensor([2]), r"0\.\.1"),
        (torch.zeros(1, 2), torch.tensor([-1]), r"0\.\.1"),
        (torch.tensor([[0.0, math.nan], [0, 1]]), torch.tensor([0, 1]), "logits .* NaN or inf in 1 of 2 rows"),
        (torch.tensor([[0.0, math.inf], [0, math.inf]]), torch.tensor([0, 1]), "logits .* NaN or inf in 2 of 2 rows"),
        (torch.tensor([[-math.inf] * 2, [0, 1]]), torch.tensor([0, 1]), "logits .* -inf for every class in 1 of 2"),
    ],
)
@pytest.mark.parametrize("function", [calibration, temperature, temperature_scaled])
def test_errors(function: Callable[[Tensor, Tensor], object], logits: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(logits, labels)


def with_impossible_class(logits: Tensor) -> Tensor:
    return torch.cat([logits, torch.full_like(logits[:, :1], -math.inf)], 1)


def test_an_impossible_class_changes_nothing() -> None:
    logits = 4 * torch.randn(400, 3)
    labels = torch.multinomial((logits / 3).softmax(-1), 1).squeeze(1)
    more = with_impossible_class(logits)
    assert temperature(more, labels) == pytest.approx(temperature(logits, labels), rel=1e-9)
    assert 2 < temperature(more, labels) < 4
    assert torch.allclose(temperature_scaled(more, labels)[:, :3], temperature_scaled(logits, labels))
    for found, expected in (
        (calibration(more, labels, resamples=10), calibration(logits, labels, resamples=10)),
        (
            calibration(temperature_scaled(more, labels), labels),
            calibration(temperature_scaled(logits, labels), labels),
        ),
    ):
        assert [found.accuracy, found.nll, found.ece, found.brier] == pytest.approx(
            [expected.accuracy, expected.nll, expected.ece, expected.brier]
        )
        assert found.ece_interval == pytest.approx(expected.ece_interval)
    some = torch.where(torch.rand(400, 1) < 0.5, more, torch.cat([logits, torch.full((400, 1), -1e5)], 1))
    assert temperature(some, labels) == pytest.approx(temperature(logits, labels), rel=1e-9)


def test_a_true_class_of_probability_zero() -> None:
    """The log loss is infinite at every temperature; the other values are those of any wrong prediction."""
    logits, labels = with_impossible_class(torch.randn(20, 2)), torch.tensor([2, 2] + [0] * 18)
    found, close = calibration(logits, labels), calibration(logits.clamp(min=-1e4), labels)
    assert found.nll == math.inf
    assert [found.accuracy, found.ece, found.brier] == pytest.approx([close.accuracy, close.ece, close.brier])
    for function in (temperature, temperature_scaled):
        with pytest.raises(ValueError, match="true class is -inf in 2 of 20 rows"):
            function(logits, labels)


def test_the_interval_covers_the_error_of_a_model_that_is_too_sure() -> None:
    """Labels are drawn at temperature 2; the error of so many instances that it is that of the model is 0.103.

    Nine of ten intervals contain it. Versions of torch draw other numbers: few draws could fail by chance.
    """
    covered = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(400, 2, generator=generator)
        labels = torch.multinomial((logits / 2).softmax(-1), 1, generator=generator).squeeze(1)
        found = calibration(logits, labels, resamples=200, seed=seed).ece_interval
        assert found is not None
        covered += found[0] <= 0.103 <= found[1]
        own = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)  # a calibrated model
        right = calibration(logits, own, resamples=200, seed=seed).ece_interval
        assert right is not None
        assert right[0] < 0.04
    assert covered >= 48
    assert calibration(logits, labels).ece_interval is None


@pytest.mark.parametrize("classes", [2, 3])
def test_the_temperature_is_the_best_of_a_grid(classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    for factor in (0.3, 1.0, 5.0):
        found = temperature(factor * logits, labels)
        losses = {t: calibration(factor * logits / t, labels).nll for t in (found, 0.98 * found, 1.02 * found)}
        assert min(losses, key=losses.__getitem__) == found
        assert found == pytest.approx(factor * temperature(logits, labels), rel=1e-6)
    assert temperature(torch.eye(4), torch.arange(4)) == pytest.approx(1 / 20)


def test_no_instance_decides_about_its_own_temperature() -> None:
    logits, labels = 6 * torch.randn(41, 3), torch.randint(3, (41,))
    scaled = temperature_scaled(logits, labels)
    other = (labels + 1) % 3
    for index in range(0, 41, 7):
        changed = labels.clone()
        changed[index] = other[index]
        assert torch.equal(temperature_scaled(logits, changed)[index], scaled[index])
    assert torch.equal(scaled.argmax(-1), logits.argmax(-1))
    with pytest.raises(ValueError, match="one instance"):
        temperature_scaled(logits[:1], labels[:1])


def test_equal_logits_have_no_temperature() -> None:
    assert temperature(torch.full((4, 3), 0.1), torch.tensor([0, 1, 2, 0])) == 1
    assert temperature(torch.tensor([[0.1, 0.1, -torch.inf]]), torch.tensor([0])) == 1
