"""Metrics agree with scikit-learn, scipy, rouge-score and the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("rouge_score", reason="rouge-score is not installed (extra lab)")

from rouge_score.rouge_scorer import RougeScorer
from scipy import stats
from sklearn import metrics as sk

from deltasam.lab.tasks import METRICS, by_sentence, rouge
from deltasam.lab.tasks._metrics import f1


@pytest.fixture
def classes() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 2, 60), random.integers(0, 2, 60)


@pytest.fixture
def numbers() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    labels = random.normal(size=50).round(1)  # with ties
    return labels + random.normal(size=50), labels


def test_classes_equal_scikit_learn(classes: tuple[np.ndarray, np.ndarray]) -> None:
    predictions, labels = classes
    assert METRICS["accuracy"](predictions, labels) == sk.accuracy_score(labels, predictions)
    assert METRICS["f1"](predictions, labels) == sk.f1_score(labels, predictions)
    assert METRICS["matthews"](predictions, labels) == sk.matthews_corrcoef(labels, predictions)


def test_classes_equal_the_formulas(classes: tuple[np.ndarray, np.ndarray]) -> None:
    predictions, labels = classes
    tp, tn = int(np.sum(predictions & labels)), int(np.sum((1 - predictions) & (1 - labels)))
    fp, fn = int(np.sum(predictions & (1 - labels))), int(np.sum((1 - predictions) & labels))
    assert METRICS["accuracy"](predictions, labels) == pytest.approx((tp + tn) / len(labels))
    assert METRICS["f1"](predictions, labels) == pytest.approx(2 * tp / (2 * tp + fp + fn))
    root = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert METRICS["matthews"](predictions, labels) == pytest.approx((tp * tn - fp * fn) / root)


def test_f1_depends_on_the_number_of_classes() -> None:
    predictions, labels = [0, 1, 1], [0, 1, 0]
    assert f1(predictions, labels) == sk.f1_score(labels, predictions)
    assert f1(predictions, labels, classes=3) == sk.f1_score(labels, predictions, average="macro")


def test_numbers_equal_scipy(numbers: tuple[np.ndarray, np.ndarray]) -> None:
    predictions, labels = numbers
    assert METRICS["pearson"](predictions, labels) == stats.pearsonr(predictions, labels).statistic
    assert METRICS["spearman"](predictions, labels) == stats.spearmanr(predictions, labels).statistic
    assert METRICS["mse"](predictions, labels) == pytest.approx(np.mean((predictions - labels) ** 2))


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
def test_correlation_of_a_constant_is_zero(metric: str) -> None:
    assert METRICS[metric]([1.0, 1.0, 1.0], [0.0, 1.0, 2.0]) == 0.0
    assert METRICS[metric]([0.0, 1.0, 2.0], [1, 1, 1]) == 0.0  # constant labels


def test_rouge_equals_rouge_score_with_stemming_on_the_summary_level() -> None:
    references = ["The cat sat on the mat.\nIt was running away.", "Dogs bark."]
    written = ["It runs away.\nA cat sits on mats.", "A dog barked loudly."]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    scores = [scorer.score(reference, text) for reference, text in zip(references, written, strict=True)]
    found = rouge(written, references)
    for name in ("rouge1", "rouge2", "rougeLsum"):
        assert found[name] == pytest.approx(np.mean([score[name].fmeasure for score in scores]))
    # Sentences in another order lower plain L but not the summary-level L.
    assert found["rougeLsum"] > np.mean([score["rougeL"].fmeasure for score in scores])


def test_one_sentence_per_line() -> None:
    assert by_sentence("One. Two! Three?\n Four .  Five") == "One.\nTwo!\nThree?\nFour .\nFive"
    assert by_sentence("") == ""
