"""Classification of the tokens, and the mean that turns token losses into losses of the instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.nn import functional as F

from deltasam.objectives._base import Supervised, at_least_float32, directed_kl, symmetric_kl
from deltasam.objectives._checks import check_choice, check_integer, check_range, check_smoothing
from deltasam.objectives.observing import see
from deltasam.step.batches import is_part_of_a_step
from deltasam.step.checks import readable

Reduction = Literal["token", "sequence"]


@dataclass(frozen=True, kw_only=True)
class Tokens(Supervised):
    r"""Cross-entropy of every token, as one loss per sequence: masked language models, token classification.

    With ``reduction="token"`` the mean of the losses is the mean over all target tokens of the batch, Hugging Face's
    loss: :math:`l_i = N \sum_t \mathrm{nll}_{it} / \sum_i T_i` with :math:`T_i` the number of target tokens of
    sequence i. With ``reduction="sequence"`` every sequence counts the same: :math:`l_i = \sum_t \mathrm{nll}_{it} /
    T_i`. The paper does not specify which one it used for summarization.

    The divergence is the symmetric Kullback-Leibler divergence of the predicted distributions at the target tokens,
    reduced in the same way. Everything is computed in float32 at least.

    Args:
        label_smoothing: Share of the target's probability that is spread evenly over the vocabulary, equal to
            Hugging Face's ``LabelSmoother``.
        ignore_index: Label of the tokens that do not count (padding, prompts).
        reduction: ``"token"`` or ``"sequence"``, see above.
        labels: Key of the labels in the batch, or a callable that returns the labels of a batch.
        predict: How to get the logits (N, T, V), ``predict(model, batch)``, if a plain call is not enough.

    Raises:
        ValueError: The labels are missing, of another shape or type, or (on the CPU) out of range or all ignored. On
            other devices, where the check would synchronise, a batch of ignored tokens has losses of zero. An instance
            or a part of a step without a target always has losses of zero.

    Example:
        >>> import torch
        >>> model, tokens = torch.nn.Embedding(7, 7), torch.tensor([[1, 2, 3], [4, 5, 0]])
        >>> batch = (tokens, tokens.masked_fill(tokens == 0, -100))
        >>> Tokens()(model, batch).shape, Tokens().items(batch)
        (torch.Size([2]), tensor(5))
    """

    directional: ClassVar[bool] = True
    _length_remedy: ClassVar[str] = "if the model changes the length, undo it in predict=..."

    label_smoothing: float = 0.0
    ignore_index: int = -100
    reduction: Reduction = "token"

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)
        check_choice(type(self).__name__, "reduction", self.reduction, Reduction)

    def targets(self, batch: Any) -> Tensor:
        """Labels of the batch, (N, T): the label at position t is the target of the logits at t."""
        labels = super().targets(batch)
        name = type(self).__name__
        check_integer(labels, name, "give token ids, with ignore_index where a token does not count")
        if labels.dim() != 2:
            raise ValueError(
                f"{name}: labels have shape {tuple(labels.shape)}, but must be (N, T), one label per token; "
                "for one label per instance use Classification()"
            )
        return labels

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        logits = at_least_float32(outputs)
        labels = self.targets(batch).to(logits.device)
        self._check(logits, labels)
        see(self, outputs, batch, labels=labels)
        nll = F.cross_entropy(
            logits.flatten(0, 1),
            labels.long().flatten(),
            reduction="none",
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )
        return self.reduced(nll.view_as(labels), labels, batch)

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        labels = self.targets(batch).to(first.device)
        return self.reduced(symmetric_kl(first, second).masked_fill(labels == self.ignore_index, 0.0), labels, batch)

    def directed(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        labels = self.targets(batch).to(first.device)
        return self.reduced(directed_kl(first, second).masked_fill(labels == self.ignore_index, 0.0), labels, batch)

    def items(self, batch: Any) -> Tensor | None:
        """Number of target tokens in the batch, on the labels' device; None if every sequence counts the same."""
        return (self.targets(batch) != self.ignore_index).sum() if self.reduction == "token" else None

    def reduced(self, values: Tensor, labels: Tensor, batch: Any) -> Tensor:
        """One number per instance from one value per token, (N, T); 0 where the label is ignored."""
        counts = (labels != self.ignore_index).sum(1)
        if self.reduction == "sequence":
            return values.sum(1) / counts.clamp(min=1)
        # In the dtype of the values: a Python number over an integer tensor would be float32.
        return values.sum(1) * (len(labels) / counts.sum().clamp(min=1).to(values.dtype))

    def _check(self, logits: Tensor, labels: Tensor) -> None:
        name = type(self).__name__
        if logits.dim() != 3 or logits.shape[:2] != labels.shape:
            raise ValueError(
                f"{name}: logits have shape {tuple(logits.shape)}, labels {tuple(labels.shape)}, but must have "
                f"(N, T, V) and (N, T); {self._length_remedy}"
            )
        check_range(labels, logits.shape[2], name, self.ignore_index)
        self._check_targets([labels])

    def check_parts(self, batches: Sequence[Any]) -> None:
        self._check_targets([self.targets(batch) for batch in batches])

    def _check_targets(self, parts: list[Tensor]) -> None:
        if is_part_of_a_step():
            return
        if all(readable(labels) and bool((labels == self.ignore_index).all()) for labels in parts):
            raise ValueError(
                f"{type(self).__name__}: every target token of the batch is ignored (label {self.ignore_index}), so "
                "there is nothing to learn from; drop such sequences, or truncate them less"
            )
