"""Which objective a Trainer minimizes: the user's, or one inferred from the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import TrainerCallback

from deltasam.integrations._arguments import check_label_smoothing
from deltasam.integrations._infer import check_inferred, infer_objective, no_labels
from deltasam.integrations._precision import visible_autocast
from deltasam.objectives.batch import unwrapped
from deltasam.objectives.nesting import innermost, with_weights
from deltasam.step.checks import check_step
from deltasam.step.passes import ObjectiveLike

_Base: Any = object  # a Trainer, once a class mixes this in


class ObjectiveMixin(_Base):
    """Chooses the objective of a :class:`MethodMixin` and prepares its batches.

    A trainer with another default overrides :meth:`default_objective`. One whose inputs are not the batches of its
    objective overrides :meth:`_objective_batch`.
    """

    _objective: Any = None
    _score: Any = None
    _inferred: Any = None
    _inference_error: ValueError | None = None
    _compare_with_model = False

    @property
    def objective(self) -> Any:
        """The objective. During ``hyperparameter_search`` it is the score of a trial: Trainer uses the same name."""
        return self._objective if self.hp_search_backend is None else self._score

    @objective.setter
    def objective(self, value: Any) -> None:
        if self.hp_search_backend is not None and not callable(value):
            self._score = value
            return
        check_label_smoothing(self.args.label_smoothing_factor, value)
        before = innermost(self._objective)
        self._set_objective(value)
        # Only the inferred objective, also inside a regulariser, has to match the model's own loss.
        self._compare_with_model = self._compare_with_model and innermost(value) is before

    def _init_objective(self, objective: ObjectiveLike | None) -> None:
        """Sets the objective given to the constructor, or the default."""
        check_label_smoothing(self.args.label_smoothing_factor, objective)
        chosen = self.default_objective() if objective is None else objective
        if chosen is not None:
            self._set_objective(chosen)

    def _set_objective(self, objective: Any) -> None:
        """Uses this objective from now on, after checking that it works with the other settings."""
        check_step(self.model, objective)
        check_objective_weights(objective, self.args.world_size, capture=self.captured is not None, model=self.model)
        if self.splitting is not None:
            self.splitting.check(objective)
        if with_weights(objective, self.model) is not None:
            self.remove_callback(ZeroAllGradients)  # at most one
            self.add_callback(ZeroAllGradients)
        self._objective = objective

    def default_objective(self) -> ObjectiveLike | None:
        """Returns the objective to use if none is given, or None if it cannot be inferred.

        A failed inference is not an error before :meth:`train`: evaluation and prediction need no objective.
        """
        try:
            self._inferred = self._infer_objective()
        except ValueError as error:
            self._inference_error = error.with_traceback(None)  # the frames would keep the model alive
            return None
        # With label smoothing the objective matches the Trainer's loss, not the model's.
        self._compare_with_model = not self.args.label_smoothing_factor
        return self._inferred

    def _infer_objective(self) -> Any:
        smoothing = self.args.label_smoothing_factor
        return infer_objective(self.model, label_smoothing=smoothing, label_names=self.label_names)

    def _require_objective(self) -> None:
        if self._objective is None and self._inference_error is not None:
            raise self._inference_error

    def _objective_batch(self, inputs: Any) -> Any:
        """Returns the batch of the objective, from the inputs of a step."""
        uses_inferred = self._inferred is not None and innermost(self._objective) is self._inferred
        if uses_inferred and isinstance(inputs, Mapping) and self._inferred.labels not in inputs:
            raise no_labels(self, inputs, self._inferred)
        return inputs

    def _check_first_batch(self, model: nn.Module, batch: Any) -> None:
        """Compares an inferred objective with the loss that the model computes, once."""
        if not self._compare_with_model:
            return
        self._compare_with_model = False
        # In its own autocast region: weights cast under no_grad would stay in the cache without a graph.
        with self.compute_loss_context_manager(), visible_autocast(self.accelerator, model):
            check_inferred(unwrapped(model), batch, innermost(self._objective))


class ZeroAllGradients(TrainerCallback):
    """Clears the gradients of all parameters of the optimizer; Trainer clears those of the model only."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["optimizer"].zero_grad()

    on_step_end = on_train_begin


def check_objective_weights(
    objective: Any, processes: int, *, capture: bool = False, model: nn.Module | None = None
) -> None:
    """Raises a ValueError if the objective's weights would diverge between processes, or never be updated."""
    module = with_weights(objective, model)
    if module is None or (processes == 1 and not capture):
        return
    if processes > 1:
        why, remedy = f"are not averaged over the {processes} processes", "train in one process"
    else:
        why, remedy = "are not returned by captured steps", "set capture=False"
    raise ValueError(
        f"objective={type(module).__name__} has trainable weights, whose gradients {why}: make them part of the "
        f"model, freeze them with requires_grad_(False), or {remedy}"
    )
