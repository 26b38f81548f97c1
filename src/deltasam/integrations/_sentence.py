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

_REMEDY = (
    "pass objective=Contrastive(temperature=0.05) for pairs of related texts, a loss that returns rows, such as "
    "loss=CosineSimilarityLoss(model, loss_fct=nn.MSELoss(reduction='none')) for scored pairs, or any callable "
    "objective(model, inputs) -> losses of shape (N,)"
)


class SentenceTransformerMethodTrainer(MethodMixin, SentenceTransformerTrainer):
    """``SentenceTransformerTrainer`` with the gradients of a method; :class:`MethodMixin` describes what it adds.

    A method needs one loss per instance, but most losses of sentence-transformers return their mean. Supported are:

    - ``objective=Contrastive(temperature=0.05)`` for pairs of related texts, with or without a regulariser around it:
      the in-batch negatives of SimCSE and Mirror-BERT, and, except for the choice of negatives,
      ``MultipleNegativesRankingLoss`` with ``scale=20``. The two text columns of the data set are its views;
    - ``loss=`` a loss that returns rows, shape (N,): your own, or one whose criterion supports it, such as
      ``CosineSimilarityLoss(model, loss_fct=nn.MSELoss(reduction="none"))``;
    - ``objective=`` any callable that maps (model, inputs of the trainer) to losses of shape (N,).

    The evaluation loss is the mean of the ``objective`` (without regularisers) if there is one, else that of ``loss``.

    Args:
        *args: Arguments of ``SentenceTransformerTrainer``.
        method: The method that computes the gradients.
        objective: Losses of the instances; by default the rows of ``loss``.
        **kwargs: Keyword arguments of ``SentenceTransformerTrainer``.
    """

    def default_objective(self) -> ObjectiveLike:
        return self._loss_rows

    def _set_objective(self, objective: Any) -> None:
        takes_views = isinstance(innermost(objective), Contrastive)
        if takes_views:
            objective = _with_embeddings(objective)
        super()._set_objective(objective)
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
        """Returns the evaluation loss."""
        if self._base_objective is None:
            loss = self._trainer_loss(model, inputs)[1].mean()
        else:
            loss = self._base_objective(model, self._objective_batch(inputs)).mean()
        return (loss, {}) if return_outputs else loss

    def _trainer_loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[nn.Module, Tensor]:
        """Returns the trainer's loss module and its value; the sum if it returns several parts."""
        features, labels = self.collect_features(inputs)  # new dictionaries: the model writes into them
        loss: Any = self.loss[inputs["dataset_name"]] if isinstance(self.loss, dict) else self.loss
        _use_model(loss, model, (self.model, self.model_wrapped))
        found = loss(features, labels)
        return loss, torch.stack(list(found.values())).sum(0) if isinstance(found, dict) else found

    def _loss_rows(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Computes the losses of the instances with the trainer's loss."""
        if type(self.loss).__name__ == "CoSENTLoss":  # checked before the call, which fails on pairs without scores
            raise ValueError(
                "loss=CoSENTLoss, the default of sentence-transformers, compares the scored pairs of a batch with "
                f"each other, but a method needs one loss per instance; {_REMEDY}"
            )
        loss, rows = self._trainer_loss(model, inputs)
        if rows.ndim == 0:
            raise ValueError(
                f"loss={type(loss).__name__} returns one loss for the batch, but a method needs one per instance; "
                f"{_REMEDY}"
            )
        return rows


def _with_embeddings(objective: Any) -> Any:
    """Makes a :class:`Contrastive`, also inside regularisers, call the model as a sentence transformer."""
    if isinstance(objective, Contrastive):
        return objective if objective.predict is not None else _changed(objective, "predict", _embeddings)
    inner = _with_embeddings(objective.objective)
    if not is_dataclass(objective):
        raise TypeError(
            f"objective={objective!r} wraps Contrastive but is not a dataclass: pass Contrastive(predict=...)"
        )
    return _changed(objective, "objective", inner)


def _changed(objective: Any, name: str, value: Any) -> Any:
    """Copies an objective with another value in a field. Keeps its weights, unlike dataclasses.replace."""
    made = copy(objective)
    object.__setattr__(made, name, value)  # the dataclasses of this package are frozen
    return made


def _embeddings(model: nn.Module, view: Mapping[str, Any]) -> Tensor:
    embeddings: Tensor = model(dict(view))["sentence_embedding"]  # a copy: the model writes into it
    return embeddings


def _use_model(loss: nn.Module, model: nn.Module, models: tuple[nn.Module, ...]) -> None:
    """Makes the loss, and losses inside it, call ``model``: one of ``models``, which are the same with wrappers."""
    for name, child in list(loss.named_children()):
        # Also in another wrapper: transformers 4 compiles the model again for an evaluation before the training.
        if any(known in (child, unwrapped(child)) for known in models):
            setattr(loss, name, model)
        else:
            _use_model(child, model, models)
