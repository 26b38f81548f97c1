"""The quality of the probabilities of a model that has diverged, or finds the true class impossible."""

from __future__ import annotations

import math

import pytest
import torch

from deltasam.analysis import calibration, temperature_scaled
from deltasam.lab.tasks._measured import quality, quality_of_run


def test_the_calibration_error_has_an_interval_before_and_after_scaling() -> None:
    torch.manual_seed(0)
    logits = torch.randn(400, 3)
    labels = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
    found = quality_of_run(5 * logits, labels).metrics  # five times too sure
    assert 0 < found["ece_low"] < found["ece"] < found["ece_high"]
    assert 0 <= found["ece_low_scaled"] <= found["ece_high_scaled"] < found["ece_low"]
    scaled = calibration(temperature_scaled(5 * logits, labels), labels, resamples=1000)
    assert (found["ece_low_scaled"], found["ece_high_scaled"]) == scaled.ece_interval


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_model_has_nan(value: float) -> None:
    logits, labels = torch.randn(8, 3), torch.arange(8) % 3
    expected = quality_of_run(logits, labels)
    logits[3, 1] = value
    assert all(map(math.isnan, quality(logits, labels).values()))
    found = quality_of_run(logits, labels)
    assert found.metrics.keys() == expected.metrics.keys()
    assert all(map(math.isnan, found.metrics.values()))
    assert not found.reliability
    assert (
        quality_of_run(logits[3:4], labels[3:4]).metrics.keys()
        == quality_of_run(logits[:1], labels[:1]).metrics.keys()
    )


def test_an_impossible_true_class_has_no_temperature() -> None:
    logits, labels = torch.randn(8, 3), torch.arange(8) % 3
    expected = quality_of_run(logits, labels)
    logits[0, 0] = -math.inf
    found = quality_of_run(logits, labels)
    assert found.metrics["nll"] == math.inf
    assert found.metrics.keys() == expected.metrics.keys()
    assert {name for name, value in found.metrics.items() if math.isnan(value)} == {
        "temperature", "nll_scaled", "brier_scaled", "ece_scaled", "ece_low_scaled", "ece_high_scaled"
    }  # fmt: skip
    assert list(found.reliability) == ["evaluation"]
