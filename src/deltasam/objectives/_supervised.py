"""What the objectives with labels have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deltasam.objectives._base import Objective
from deltasam.objectives._batch import Labels, Predict, call, inputs_of, labels_of, tensor_of


@dataclass(frozen=True, kw_only=True)
class Supervised(Objective):
    """An objective whose batch holds inputs and labels; the model sees the inputs alone.

    Args:
        labels: Key of the labels in the batch, or a callable that takes the labels out of the batch.
        predict: How to get the outputs, ``predict(model, batch)``. By default a mapping (Hugging Face's
            ``BatchEncoding`` included) goes into the model by keywords, without the labels, and of a pair
            ``(inputs, labels)`` the inputs do.
    """

    labels: Labels = "labels"
    predict: Predict | None = None

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """Logits of the model for the batch."""
        name = type(self).__name__
        if self.predict is not None:
            return tensor_of(self.predict(model, batch), "logits", name)
        return tensor_of(call(model, self.inputs(model, batch)), "logits", name)

    def inputs(self, model: nn.Module, batch: Any) -> Any:
        """What the model is called with: the batch without its labels."""
        return inputs_of(batch, self.labels, type(self).__name__)

    def targets(self, batch: Any) -> Tensor:
        """Labels of the batch."""
        return labels_of(batch, self.labels, type(self).__name__)
