"""Metrics by name: thin calls into scikit-learn, scipy and rouge-score, which are imported when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Share of the predictions that are right."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def f1(predictions: ArrayLike, labels: ArrayLike, classes: int | None = None) -> float:
    """F1 of class 1, GLUE's second metric of MRPC and QQP; the macro average where there are more than two classes.

    Args:
        predictions: Numbers of classes.
        labels: The right ones.
        classes: How many there are; by default as many as the largest number says, which a small sample may not hold.
    """
    from sklearn.metrics import f1_score

    if classes is None:
        classes = 1 + int(max(np.max(np.asarray(labels)), np.max(np.asarray(predictions))))
    return float(f1_score(labels, predictions, average="macro" if classes > 2 else "binary", zero_division=0.0))


def matthews(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Matthews correlation, GLUE's metric of CoLA."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def pearson(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Pearson correlation; 0 where all predictions are the same, for which it is not defined."""
    from scipy.stats import pearsonr

    return 0.0 if _constant(predictions, labels) else float(pearsonr(predictions, labels).statistic)


def spearman(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Spearman correlation; 0 where all predictions are the same, for which it is not defined."""
    from scipy.stats import spearmanr

    return 0.0 if _constant(predictions, labels) else float(spearmanr(predictions, labels).statistic)


def mse(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Mean squared error."""
    return float(np.mean((np.asarray(predictions, dtype=float) - np.asarray(labels, dtype=float)) ** 2))


Metric = Callable[[ArrayLike, ArrayLike], float]

#: Metrics of classes or numbers, ``metric(predictions, labels)``, by the names that configurations use.
METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
    "mse": mse,
}


def measure(metric: str, predictions: ArrayLike, labels: ArrayLike, classes: int) -> float:
    """The metric of this name; ``classes`` is for those that depend on how many there are."""
    function = METRICS[metric]
    return f1(predictions, labels, classes) if function is f1 else function(predictions, labels)


#: Metrics of which less is better.
LOWER_IS_BETTER = frozenset({"mse"})


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """F1 of ROUGE-1, ROUGE-2 and ROUGE-Lsum, with Porter stemming, one sentence per line.

    ROUGE-Lsum is the summary-level L of the published CNN/DailyMail tables; ``rougeL`` of the same package is not.
    """
    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeLsum")
    scorer = RougeScorer(list(names), use_stemmer=True)
    found = [scorer.score(reference, text) for text, reference in zip(predictions, references, strict=True)]
    return {name: float(np.mean([score[name].fmeasure for score in found])) for name in names}


def _constant(predictions: ArrayLike, labels: ArrayLike) -> bool:
    return bool(np.ptp(np.asarray(predictions, dtype=float)) == 0 or np.ptp(np.asarray(labels, dtype=float)) == 0)
