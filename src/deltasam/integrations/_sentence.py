"""sentence-transformers' trainer with a method."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import is_dataclass
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainer
from torch import Tensor, nn

from deltasam.integrations._mixin import MethodMixin
from deltasam.objectives import Contrastive
from deltasam.objectives.batch import unwrapped
from deltasam.objectives.nesting import innermost
from deltasam.step.passes import ObjectiveLike

_WAY_OUT = (
    "pass objective=Contrastive(temperature=0.05) for pairs of texts that belong together, a loss that returns rows, "
    "such as loss=CosineSimilarityLoss(model, loss_fct=nn.MSELoss(reduction='none')) for scored ones, or any callable "
    "objective(model, inputs) -> losses of shape (N,)"
)

_SCORED = ("CoSENTLoss", "AnglELoss", "CosineSimilarityLoss")


class SentenceTransformerMethodTrainer(MethodMixin, SentenceTransformerTrainer):
    """``SentenceTransformerTrainer`` whose gradients are a method's; see :class:`MethodMixin` for what is added.

    A method needs one loss per instance, and most losses of sentence-transformers return their mean. What works:

    - ``objective=Contrastive(temperature=0.05)`` for pairs of texts that belong together (the in-batch negatives of
      SimCSE, Mirror-BERT and, up to its negatives, ``MultipleNegativesRankingLoss`` with ``scale=20``), with or
      without a regulariser around it; the two text columns of the data set are its views;
    - ``loss=`` a loss that returns rows, shape (N,): your own, or one whose criterion can be told to, such as
      ``CosineSimilarityLoss(model, loss_fct=nn.MSELoss(reduction="none"))``;
    - ``objective=`` any callable that maps (model, inputs), the inputs being the trainer's, to losses of shape (N,).

    With an ``objective`` the evaluation loss is its mean (without regularisers), otherwise that of ``loss``.

    Args:
        *args: ``SentenceTransformerTrainer``'s.
        method: What takes the gradients.
        objective: Losses of the instances; by default the rows of ``loss``.
        **kwargs: ``SentenceTransformerTrainer``'s.
    """

    def _default_objective(self) -> ObjectiveLike:
        return self._loss_rows

    def _put_objective(self, objective: Any) -> None:
        takes_views = isinstance(innermost(objective), Contrastive)
        if takes_views:
            objective = _with_embeddings(objective)
        super()._put_objective(objective)
        self._takes_views = takes_views
        self._base_objective = None if objective == self._loss_rows else innermost(objective)

    def _objective_batch(self, inputs: Any) -> Any:
        if not self._takes_views:
            return inputs
        features, _ = self.collect_features(inputs)
        if len(features) != 2:
            raise ValueError(
                f"Contrastive compares two views, but the data set has {len(features)} text columns: select two with "
                "dataset.select_columns([...]), or pass another objective"
            )
        return {"first": features[0], "second": features[1]}

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """The loss for evaluation."""
        if self._base_objective is None:
            loss = self._own_loss(model, inputs)[1].mean()
        else:
            loss = self._base_objective(model, self._objective_batch(inputs)).mean()
        return (loss, {}) if return_outputs else loss

    def _own_loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[nn.Module, Tensor]:
        """The trainer's own loss, and what it gives; the sum of its parts, if it gives several."""
        features, labels = self.collect_features(inputs)  # new dictionaries: the model writes into them
        loss: Any = self.loss[inputs["dataset_name"]] if isinstance(self.loss, dict) else self.loss
        if labels is None and type(loss).__name__ in _SCORED:
            raise ValueError(
                f"loss={type(loss).__name__} is for scored pairs, and the data set has no scores, a column named "
                f"'score' or 'label': dataset.rename_column(NAME, 'score') where it has them; otherwise {_WAY_OUT}"
            )
        _put_model(loss, model, (self.model, self.model_wrapped))
        found = loss(features, labels)
        return loss, torch.stack(list(found.values())).sum(0) if isinstance(found, dict) else found

    def _loss_rows(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The losses of the instances by the trainer's own loss."""
        if type(self.loss).__name__ == "CoSENTLoss":  # before it is called: it fails on pairs without scores
            raise ValueError(
                "loss=CoSENTLoss, which sentence-transformers takes where there is neither loss= nor objective=, "
                "compares the scored pairs of a batch with each other, but a method needs one loss per instance; "
                f"{_WAY_OUT}"
            )
        loss, rows = self._own_loss(model, inputs)
        if rows.ndim == 0:
            raise ValueError(
                f"loss={type(loss).__name__} returns one loss for the batch, but a method needs one per instance; "
                f"{_WAY_OUT}"
            )
        return rows


def _with_embeddings(objective: Any) -> Any:
    """The objective (or what it wraps) calling the model as a sentence transformer is called."""
    if isinstance(objective, Contrastive):
        return objective if objective.predict is not None else _changed(objective, "predict", _embeddings)
    inner = _with_embeddings(objective.objective)
    if not is_dataclass(objective):
        raise TypeError(
            f"objective={objective!r} wraps Contrastive and is no dataclass: give Contrastive(predict=...)"
        )
    return _changed(objective, "objective", inner)


def _changed(objective: Any, name: str, value: Any) -> Any:
    """A copy with another value in a field, and the same weights, which dataclasses.replace would make anew."""
    made = copy(objective)
    object.__setattr__(made, name, value)  # dataclasses of this package are frozen
    return made


def _embeddings(model: nn.Module, view: Mapping[str, Any]) -> Tensor:
    embeddings: Tensor = model(dict(view))["sentence_embedding"]  # a copy: the model writes into it
    return embeddings


def _put_model(loss: nn.Module, model: nn.Module, models: tuple[nn.Module, ...]) -> None:
    """Makes the loss, and losses inside it, use this one of the models: wrapped for data parallelism, or not."""
    for name, child in list(loss.named_children()):
        # One in another wrapper too: transformers 4 has compiled one of its own for an evaluation before the training.
        if any(known in (child, unwrapped(child)) for known in models):
            setattr(loss, name, model)
        else:
            _put_model(child, model, models)
