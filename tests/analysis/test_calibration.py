"""Calibration against a loop over the bins and the instances, and against scikit-learn."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn import metrics as sk

from deltasam.analysis import calibration


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
    ],
)
def test_errors(logits: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibration(logits, labels)
