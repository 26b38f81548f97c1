"""Metrics by name, from scikit-learn, scipy and rouge-score, which are imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Returns the fraction of correct predictions."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def f1(predictions: ArrayLike, labels: ArrayLike, classes: int | None = None) -> float:
    """Returns F1 of class 1, GLUE's second metric for MRPC and QQP; with more than two classes the macro average."""
    from sklearn.metrics import f1_score

    if classes is None:
        classes = 1 + int(max(np.max(np.asarray(labels)), np.max(np.asarray(predictions))))
    return float(f1_score(labels, predictions, average="macro" if classes > 2 else "binary", zero_division=0.0))


def matthews(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Returns the Matthews correlation, GLUE's metric for CoLA."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def pearson(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Returns the Pearson correlation, or 0 for constant predictions or labels, where it is undefined."""
    return _correlation("pearsonr", predictions, labels)


def spearman(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Returns the Spearman correlation, or 0 for constant predictions or labels, where it is undefined."""
    return _correlation("spearmanr", predictions, labels)


def _correlation(name: str, predictions: ArrayLike, labels: ArrayLike) -> float:
    from scipy import stats

    is_constant = any(np.ptp(np.asarray(values, dtype=float)) == 0 for values in (predictions, labels))
    return 0.0 if is_constant else float(getattr(stats, name)(predictions, labels).statistic)


def mse(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Returns the mean squared error."""
    return float(np.mean((np.asarray(predictions, dtype=float) - np.asarray(labels, dtype=float)) ** 2))


#: Metrics ``metric(predictions, labels)`` of classes or numbers, by their names in configurations.
METRICS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
    "mse": mse,
}

#: Metrics for which lower is better.
LOWER_IS_BETTER = frozenset({"mse"})


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Returns F1 of ROUGE-1, ROUGE-2 and ROUGE-Lsum, with Porter stemming. Texts have one sentence per line.

    The published CNN/DailyMail tables report the summary-level ROUGE-Lsum, not ``rougeL`` of the same package.
    """
    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeLsum")
    scorer = RougeScorer(list(names), use_stemmer=True)
    found = [scorer.score(reference, text) for text, reference in zip(predictions, references, strict=True)]
    return {name: float(np.mean([score[name].fmeasure for score in found])) for name in names}
