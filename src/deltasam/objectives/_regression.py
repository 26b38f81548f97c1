"""Regression on the instances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltasam.objectives._base import Supervised, at_least_float32


@dataclass(frozen=True, kw_only=True)
class Regression(Supervised):
    r"""Squared error of each instance, :math:`l_i = (f(x_i) - y_i)^2`, in float32 at least.

    The mean equals the loss of Hugging Face's heads with ``num_labels=1`` (STS-B). With several numbers per instance,
    outputs and labels of shape (N, C), the mean of their squared errors, as with ``problem_type="regression"``. The
    divergence is the squared difference of two predictions.

    Args:
        labels: Key of the labels in the batch, or a callable that returns the labels of a batch.
        predict: How to get the predictions, (N,), (N, 1) or (N, C), if a plain call of the model is not enough.

    Raises:
        ValueError: The labels are missing or do not fit the shape of the predictions.

    Example:
        >>> import torch
        >>> model, batch = torch.nn.Linear(3, 1), (torch.randn(4, 3), torch.randn(4))
        >>> Regression()(model, batch).shape
        torch.Size([4])
    """

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        labels = self.targets(batch).to(outputs.device)
        if labels.dtype == torch.bool or labels.is_complex():
            raise ValueError(
                f"Regression: labels have type {labels.dtype}, but must be numbers; for classes use Classification()"
            )
        predictions, targets = _columns(outputs), _columns(labels)
        if predictions.dim() != 2 or predictions.shape != targets.shape:
            raise ValueError(
                f"Regression: the model predicts {tuple(outputs.shape)}, but the labels have shape "
                f"{tuple(labels.shape)}; one number per instance needs a model with num_labels=1, several need "
                "labels of shape (N, C), and class labels need Classification()"
            )
        predictions = at_least_float32(predictions)
        return (predictions - targets.to(predictions.dtype)).square().mean(-1)

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        return (_columns(at_least_float32(first)) - _columns(at_least_float32(second))).square().mean(-1)


def _columns(values: Tensor) -> Tensor:
    """(N,) as (N, 1), so that neither broadcasts against the other into (N, N)."""
    return values.unsqueeze(-1) if values.dim() == 1 else values
