"""Whether the probabilities of a classifier can be trusted: calibration error, log loss, Brier score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltasam.methods import check_number


@dataclass(frozen=True)
class ReliabilityBin:
    """The predictions whose confidence lies in ``(lower, upper]``.

    Attributes:
        lower: Lower end of the bin.
        upper: Upper end of the bin.
        count: Number of predictions in it.
        confidence: Their mean probability; 0 if there are none.
        accuracy: The fraction of them that is right; 0 if there are none.
    """

    lower: float
    upper: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Quality of predicted probabilities.

    Attributes:
        accuracy: Fraction of right predictions.
        nll: Mean negative log-probability of the true class.
        ece: Expected calibration error, in [0, 1].
        brier: Mean squared distance of the probabilities from the one-hot label, in [0, 2].
        bins: The bins of the reliability diagram, from low to high confidence.
    """

    accuracy: float
    nll: float
    ece: float
    brier: float
    bins: tuple[ReliabilityBin, ...]


def calibration(logits: Tensor, labels: Tensor, *, bins: int = 15) -> Calibration:
    r"""Returns accuracy, log loss, expected calibration error, Brier score and the bins of a reliability diagram.

    The confidence of a prediction is its probability, :math:`\max_c p_c`. The predictions are sorted into ``bins``
    bins :math:`B_b` of equal width (Guo et al. 2017, https://arxiv.org/abs/1706.04599):

    .. math:: \text{ECE} = \sum_b \frac{|B_b|}{N} \left|\text{acc}(B_b) - \text{conf}(B_b)\right|

    Computed in float64.

    Args:
        logits: Logits or log-probabilities, (instances, classes). The softmax of log-probabilities is the
            probabilities themselves.
        labels: Numbers of the true classes, (instances,).
        bins: Number of bins.

    Raises:
        ValueError: The shapes do not fit, there are no instances, or a label is not a class.

    Example:
        >>> sure = torch.tensor([[0.9, 0.1], [0.9, 0.1]]).log()
        >>> found = calibration(sure, torch.tensor([0, 1]))
        >>> found.accuracy, round(found.ece, 6), round(found.brier, 6)
        (0.5, 0.4, 0.82)
    """
    check_number("bins", bins, 1, whole=True)
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or not len(labels):
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and labels {tuple(labels.shape)}; pass (instances, classes) and "
            "(instances,), at least one instance"
        )
    if labels.is_floating_point() or not 0 <= int(labels.min()) <= int(labels.max()) < logits.shape[1]:
        raise ValueError(f"labels must be numbers of classes in 0..{logits.shape[1] - 1}")
    labels = labels.to(logits.device).long()
    log_p = logits.detach().double().log_softmax(-1)
    p = log_p.exp()
    confidence, predicted = p.max(-1)
    right = (predicted == labels).double()
    # The bin of the confidence c is (b / bins, (b + 1) / bins]; rounding must not put c = 1 behind the last one.
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=p.device)
    index = torch.bucketize(confidence, edges[1:-1])
    count, right_sum, sum_of_confidence = (
        torch.zeros(bins, dtype=torch.float64, device=p.device).index_add_(0, index, values)
        for values in (torch.ones_like(right), right, confidence)
    )
    filled = count.clamp(min=1)
    found = tuple(
        ReliabilityBin(float(edges[b]), float(edges[b + 1]), int(count[b]), *means)
        for b, means in enumerate(torch.stack([sum_of_confidence / filled, right_sum / filled], 1).tolist())
    )
    return Calibration(
        accuracy=float(right.mean()),
        nll=float(-log_p.gather(-1, labels[:, None]).mean()),
        ece=float((right_sum - sum_of_confidence).abs().sum() / len(labels)),
        brier=float((p - torch.nn.functional.one_hot(labels, p.shape[1])).square().sum(-1).mean()),
        bins=found,
    )
