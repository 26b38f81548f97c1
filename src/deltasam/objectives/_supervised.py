"""The base class of objectives with labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deltasam.objectives._base import Objective
from deltasam.objectives.batch import Labels, Predict, call, inputs_of, labels_of, tensor_of


@dataclass(frozen=True, kw_only=True)
class Supervised(Objective):
    """An objective whose batch consists of inputs and labels; the model sees only the inputs.

    Args:
        labels: Key of the labels in the batch, or a callable that returns the labels of a batch.
        predict: How to get the outputs, ``predict(model, batch)``. By default the model is called with a mapping
            (Hugging Face's ``BatchEncoding`` included) by keywords, without the labels, or with the inputs of a pair
            ``(inputs, labels)``.
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
        """The inputs of the model: the batch without its labels."""
        return inputs_of(batch, self.labels, type(self).__name__)

    def targets(self, batch: Any) -> Tensor:
        """Labels of the batch."""
        return labels_of(batch, self.labels, type(self).__name__)
