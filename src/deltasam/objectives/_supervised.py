"""What the objectives with labels have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deltasam.objectives._base import Objective
from deltasam.objectives.batch import Labels, Predict, call, inputs_of, labels_of, tensor_of


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
        return tensor_of(self.outputs(model, batch), "logits", type(self).__name__)

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """What the model, or ``predict``, returns."""
        return call(model, self.inputs(model, batch)) if self.predict is None else self.predict(model, batch)

    def inputs(self, model: nn.Module, batch: Any) -> Any:
        """What the model is called with: the batch without its labels."""
        return inputs_of(batch, self.labels, type(self).__name__)

    def targets(self, batch: Any) -> Tensor:
        """Labels of the batch."""
        return labels_of(batch, self.labels, type(self).__name__)
