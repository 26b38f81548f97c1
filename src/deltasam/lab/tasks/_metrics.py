"""Metrics by name, from scikit-learn, scipy and rouge-score, which are imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

Metric = Callable[[ArrayLike, ArrayLike], float]


def _of_classes(name: str) -> Metric:
    def metric(predictions: ArrayLike, labels: ArrayLike) -> float:
        from sklearn import metrics

        return float(getattr(metrics, name)(labels, predictions))

    return metric


def _correlation(name: str) -> Metric:
    def metric(predictions: ArrayLike, labels: ArrayLike) -> float:
        from scipy import stats

        is_constant = any(np.ptp(np.asarray(values, dtype=float)) == 0 for values in (predictions, labels))
        return 0.0 if is_constant else float(getattr(stats, name)(predictions, labels).statistic)

    return metric


def f1(predictions: ArrayLike, labels: ArrayLike, classes: int | None = None) -> float:
    """Returns F1 of class 1, GLUE's second metric for MRPC and QQP; with more than two classes the macro average."""
    from sklearn.metrics import f1_score

    if classes is None:
        classes = 1 + int(max(np.max(np.asarray(labels)), np.max(np.asarray(predictions))))
    return float(f1_score(labels, predictions, average="macro" if classes > 2 else "binary", zero_division=0.0))


def mse(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Returns the mean squared error."""
    return float(np.mean((np.asarray(predictions, dtype=float) - np.asarray(labels, dtype=float)) ** 2))


#: Metrics ``metric(predictions, labels)`` of classes or numbers, by their names in configurations. Correlations are 0
#: for constant predictions or labels, where they are undefined.
METRICS: dict[str, Callable[..., float]] = {
    "accuracy": _of_classes("accuracy_score"),
    "f1": f1,
    "matthews": _of_classes("matthews_corrcoef"),
    "pearson": _correlation("pearsonr"),
    "spearman": _correlation("spearmanr"),
    "mse": mse,
}

#: Metrics of predictions that are numbers, not classes.
OF_NUMBERS = ("pearson", "spearman", "mse")

#: Metrics for which lower is better.
LOWER_IS_BETTER = frozenset({"mse", "nll", "ece", "brier", "perplexity"})


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Returns F1 of ROUGE-1, ROUGE-2 and ROUGE-Lsum, with Porter stemming. Texts have one sentence per line.

    The published CNN/DailyMail tables report the summary-level ROUGE-Lsum, not ``rougeL`` of the same package.
    """
    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeLsum")
    scorer = RougeScorer(list(names), use_stemmer=True)
    found = [scorer.score(reference, text) for text, reference in zip(predictions, references, strict=True)]
    return {name: float(np.mean([score[name].fmeasure for score in found])) for name in names}
