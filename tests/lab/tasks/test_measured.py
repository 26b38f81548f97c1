"""The quality of the probabilities of a model that has diverged, or finds the true class impossible."""

from __future__ import annotations

import math

import pytest
import torch

from deltasam.lab.tasks._measured import quality, quality_of_run


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
        "temperature", "nll_scaled", "brier_scaled", "ece_scaled"
    }  # fmt: skip
    assert list(found.reliability) == ["evaluation"]
