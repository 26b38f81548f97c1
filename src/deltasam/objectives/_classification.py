"""Classification of the instances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from deltasam.objectives._base import Supervised, at_least_float32, directed_kl, symmetric_kl
from deltasam.objectives._checks import check_integer, check_range, check_smoothing
from deltasam.step.checks import readable


@dataclass(frozen=True, kw_only=True)
class Classification(Supervised):
    r"""Cross-entropy of each instance, :math:`l_i = -\log p(y_i | x_i)`, in float32 at least.

    The mean equals the loss of Hugging Face's sequence classification heads and, with ``multi_label``, that of their
    ``problem_type="multi_label_classification"``. The divergence is the symmetric Kullback-Leibler divergence; with
    ``multi_label`` the mean of those of the classes' yes-or-no distributions.

    Args:
        label_smoothing: Share of the target's probability that is spread evenly over all classes.
        multi_label: Each class is a separate yes-or-no question: labels of shape (N, C) with zeros and ones (or
            probabilities), :math:`l_i` the mean of the C binary cross-entropies.
        labels: Key of the labels in the batch, or a callable that returns the labels of a batch.
        predict: How to get the logits (N, C), ``predict(model, batch)``, if a plain call of the model is not enough.

    Raises:
        ValueError: The labels are missing, of another shape or type, or (on the CPU) out of range.

    Example:
        >>> import torch
        >>> model, batch = torch.nn.Linear(3, 2), (torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
        >>> Classification()(model, batch).shape
        torch.Size([4])
    """

    directional: ClassVar[bool] = True

    label_smoothing: float = 0.0
    multi_label: bool = False

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)
        if self.multi_label and self.label_smoothing:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing} with multi_label=True, where it is not defined: "
                "smooth the labels themselves (they may be probabilities) and leave label_smoothing at 0"
            )

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        logits = at_least_float32(outputs)
        labels = self.targets(batch).to(logits.device)
        if self.multi_label:
            if labels.shape != logits.shape:
                raise ValueError(
                    f"Classification(multi_label=True): labels have shape {tuple(labels.shape)}, logits "
                    f"{tuple(logits.shape)}; labels must be (N, C), a zero or one for every class of every instance"
                )
            targets = labels.to(logits.dtype)
            _check_probabilities(targets)
            return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(-1)
        _check(logits, labels)
        return F.cross_entropy(logits, labels.long(), reduction="none", label_smoothing=self.label_smoothing)

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        if self.multi_label:
            # KL(p||q) + KL(q||p) of two Bernoulli distributions is (p - q)(logit p - logit q).
            first, second = at_least_float32(first), at_least_float32(second)
            return 0.5 * ((first.sigmoid() - second.sigmoid()) * (first - second)).mean(-1)
        return symmetric_kl(first, second)

    def directed(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        if self.multi_label:
            # A yes-or-no distribution is a softmax over the logits (x, 0).
            first, second = (torch.stack((x, torch.zeros_like(x)), -1) for x in (first, second))
            return directed_kl(first, second).mean(-1)
        return directed_kl(first, second)


def _check_probabilities(targets: Tensor) -> None:
    outside = (targets - 0.5).abs() > 0.501  # mixed or smoothed labels may exceed 1 by a rounding error
    if readable(outside) and bool(outside.any()):
        raise ValueError(
            f"Classification(multi_label=True): labels contain {float(targets[outside][0]):g}, but must be zeros and "
            "ones (or probabilities), also where other code ignores a label; drop such instances, or use an objective "
            "of your own"
        )


def _check(logits: Tensor, labels: Tensor) -> None:
    check_integer(
        labels,
        "Classification",
        "for regression use Regression(), for zeros and ones of shape (N, C) Classification(multi_label=True)",
    )
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"Classification: labels have shape {tuple(labels.shape)}, logits {tuple(logits.shape)}, but must have "
            "(N,) and (N, C); for a label at every token use Tokens(), Seq2Seq() or CausalLM()"
        )
    if logits.shape[1] < 2:
        raise ValueError(
            f"Classification: logits have shape {tuple(logits.shape)}, one class, which makes every loss zero; "
            "set the model's num_labels to 2 or more, or use Regression() or Classification(multi_label=True)"
        )
    check_range(labels, logits.shape[1], "Classification")
