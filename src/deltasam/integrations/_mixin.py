"""A method in the place of ``loss.backward()`` in Hugging Face's ``Trainer`` and its relatives."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.integrations._arguments import (
    check_method,
    refuse_other_smoothing,
    refuse_overrides,
    refuse_unsupported,
)
from deltasam.integrations._infer import check_inferred, infer_objective, no_labels
from deltasam.integrations._logged_loss import LossFilter
from deltasam.integrations._metrics import StepMetrics
from deltasam.integrations._objective_weights import ZeroAllGradients, check_objective_weights
from deltasam.integrations._precision import visible_autocast
from deltasam.integrations._state import load_state, save_state
from deltasam.integrations._worker_errors import explain_worker_errors
from deltasam.methods import Method
from deltasam.objectives._base import load_objective
from deltasam.objectives.batch import unwrapped
from deltasam.objectives.nesting import innermost, with_weights
from deltasam.speed.capture import Captured
from deltasam.speed.splitting import OnOutOfMemory, Splitting, check_out_of_memory
from deltasam.step.batches import batch_size, ratio
from deltasam.step.checks import check_step, readable
from deltasam.step.parts import part_of_a_step
from deltasam.step.passes import ObjectiveLike

_Base: Any = object  # a Trainer, by the class that mixes this in
_log = logging.getLogger(__name__)


class MethodMixin(_Base):
    """Makes a ``Trainer`` take its gradients by a method: put it before the ``Trainer`` in the bases of your own.

    Everything else is the Trainer's: optimizer, schedule, accumulation, clipping, mixed precision, evaluation,
    callbacks and checkpoints, which hold the state of the method and of the objective too (as JSON and safetensors).
    The evaluation loss is the model's own. ``train()`` starts the method's state afresh unless it resumes.

    *Accumulation.* Each micro-batch has a perturbation of its own (m-sharpness, m = the size of a micro-batch), and
    what counts steps (``LookSAM``'s k, SMART's teacher) counts micro-batches. The gradients of the micro-batches are
    added with the weight of their instances, or of their target tokens, in all of them: for :class:`~deltasam.ERM` the
    sum is the gradient of the large batch, for every model.

    *Logging.* To the Trainer's own entries come ``sharpness``, ``ascent_grad_norm`` (of the gradient that the
    perturbation follows; ``grad_norm`` is, as ever, what the optimizer gets), ``weights_mean``, ``weights_std``,
    ``weights_max`` (of the instance weights g), each a mean over the steps since the last entry, and ``skipped``, the
    number of steps so far that left the perturbation out; at the end ``train_forwards`` and ``train_backwards``, the
    passes made in all.

    *Schedules.* A callback may change the method: ``trainer.method = trainer.method.replace(rho=...)``. Steps are then
    recorded anew with ``capture``.

    *Waiting.* No step waits for the device, only log entries, evaluations and checkpoints do: batches are copied to a
    GPU asynchronously, and ``args.logging_nan_inf_filter`` is kept there, a loss that is not finite being logged as
    the last finite one.

    *Mixed precision.* The objective runs inside the autocast region, as in a plain PyTorch loop, the model's outputs
    being float32.

    Args:
        *args: The Trainer's.
        method: What takes the gradients, for example ``DeltaSAM(rho=0.05)``.
        objective: ``objective(model, batch) -> (N,)``. By default inferred from the model's head, its problem type and
            the label names, with ``args.label_smoothing_factor``. It may be a module with weights of its own: give
            them to the optimizer, ``optimizers=(..., None)``; checkpoints hold them, clipping leaves them out.
        capture: Record steps as CUDA graphs, one per batch shape, see :class:`~deltasam.speed.capture.Captured`. Keep shapes
            few: ``DataCollatorWithPadding(tokenizer, pad_to_multiple_of=32)``. Does nothing on the CPU.
        on_out_of_memory: ``"stop"``: an error that says which pass and what to lower; ``"split"``: the step is taken
            again with the batch in halves, see :class:`~deltasam.speed.splitting.Splitting`. In one process only.
        **kwargs: The Trainer's.

    Raises:
        TypeError: ``method`` is not a method, or ``objective`` not an objective.
        ValueError: The Trainer is set up in a way that no method can work with. If the objective cannot be inferred,
            ``train()`` raises it: evaluation and prediction need none.
    """

    method: Method
    _accounted_for: tuple[type, ...] = ()
    """Trainers whose ``compute_loss`` and ``training_step`` a subclass makes up for."""

    def __init__(
        self,
        *args: Any,
        method: Method = None,  # type: ignore[assignment]  # there has to be one; who forgets it is told by name
        objective: ObjectiveLike | None = None,
        capture: bool = False,
        on_out_of_memory: OnOutOfMemory = "stop",
        **kwargs: Any,
    ) -> None:
        check_method(method, type(self).__name__)
        check_out_of_memory(on_out_of_memory, capture=capture)
        known = objective is not None
        refuse_overrides(type(self), MethodMixin, has_objective=known, accounted_for=self._accounted_for)
        self._inferred: Any = None  # the objective, if it was
        self._not_inferred: ValueError | None = None  # why it could not be
        self._unchecked = False  # whether the objective was inferred, and not compared with the model's loss yet
        super().__init__(*args, **kwargs)
        refuse_unsupported(self)
        refuse_other_smoothing(self.args.label_smoothing_factor, objective)
        if self.args.gradient_checkpointing:
            # The default of transformers 4 does not allow torch.autograd.grad, which most methods call.
            given = self.args.gradient_checkpointing_kwargs or {}
            self.args.gradient_checkpointing_kwargs = {"use_reentrant": False, **given}
        self.method = method
        self.captured = Captured(method) if capture else None
        self.splitting = Splitting(method) if on_out_of_memory == "split" else None
        self._score: Any = None
        self._objective: Any = None
        wanted = self._default_objective() if objective is None else objective
        if wanted is not None:
            self._put_objective(wanted)
        self.forwards = self.backwards = 0
        self._step_metrics = StepMetrics()
        self._losses = LossFilter()
        self._operations: dict[Any, Any] = {}

    @property
    def objective(self) -> Any:
        """What is minimized; inside ``hyperparameter_search`` the score of a trial, which Trainer calls the same."""
        return self._objective if self.hp_search_backend is None else self._score

    @objective.setter
    def objective(self, value: Any) -> None:
        if self.hp_search_backend is None or callable(value):
            refuse_other_smoothing(self.args.label_smoothing_factor, value)
            before = innermost(self._objective)
            self._put_objective(value)
            # The inferred one is to be the model's loss, inside a regulariser too; another one need not be.
            self._unchecked = self._unchecked and innermost(value) is before
        else:
            self._score = value

    def _put_objective(self, objective: Any) -> None:
        """Goes by this objective from here on, unless the training cannot."""
        check_step(self.model, objective)
        check_objective_weights(objective, self.args.world_size, capture=self.captured is not None, model=self.model)
        if self.splitting is not None:
            self.splitting.check(objective)
        if with_weights(objective, self.model) is not None:
            self.remove_callback(ZeroAllGradients)  # once is enough
            self.add_callback(ZeroAllGradients)
        self._objective = objective

    # -- what a subclass may change ------------------------------------------------------------------------------

    def _default_objective(self) -> ObjectiveLike | None:
        """The objective if none was given; None if it cannot be inferred, which is an error in :meth:`train` only."""
        smoothing = self.args.label_smoothing_factor
        try:
            self._inferred = infer_objective(self.model, label_smoothing=smoothing, label_names=self.label_names)
        except ValueError as error:
            self._not_inferred = error.with_traceback(None)  # its frames would keep the model
            return None
        self._unchecked = not smoothing  # with smoothing it is the Trainer's loss, not the model's
        return self._inferred

    def _check_objective(self) -> None:
        if self._objective is None and self._not_inferred is not None:
            raise self._not_inferred

    def _objective_batch(self, inputs: Any) -> Any:
        """What the objective gets of the inputs of a step."""
        used = self._inferred is not None and innermost(self._objective) is self._inferred
        if used and isinstance(inputs, Mapping) and self._inferred.labels not in inputs:
            raise no_labels(self, inputs, self._inferred)
        return inputs

    # -- the step ------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's, whose copies of batches to a GPU wait there for nothing."""
        super().create_accelerator_and_postprocess()
        if self.args.device.type == "cuda":
            # Otherwise every copy waits until the device has done all that it was told before, the last step included.
            self.accelerator.dataloader_config.non_blocking = True

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One backward by the method on one micro-batch; returns its share of the loss at w."""
        self._check_objective()
        if not all(module.training for module in model.modules()):  # as train() does, in a third of its time
            model.train()
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers have modes
            self.optimizer.train()
        batch = self._objective_batch(self._prepare_inputs(inputs))
        with part_of_a_step(num_items_in_batch is not None):  # by get_batch_samples, which has looked at all of them
            return self._method_step(model, batch, num_items_in_batch)

    def _method_step(self, model: nn.Module, batch: Any, num_items_in_batch: Any) -> Tensor:
        if self._unchecked:
            self._unchecked = False
            with self.compute_loss_context_manager(), visible_autocast(self.accelerator, model):
                check_inferred(unwrapped(model), batch, innermost(self._objective))
        scale = Scale(self._share(batch, num_items_in_batch), self.accelerator.scaler)
        with self.compute_loss_context_manager(), visible_autocast(self.accelerator, model):
            if self.captured is not None:
                self.captured = self._up_to_date(self.captured)
                step = self.captured.backward(model, batch, self._objective, scale=scale.fixed(self.args.device))
            elif self.splitting is not None:
                self.splitting.method = self.method  # a callback may have changed it
                step = self.splitting.backward(model, batch, self._objective, scale=scale)
            else:
                step = self.method.backward(model, batch, self._objective, scale=scale)
        self.forwards += step.forwards
        self.backwards += step.backwards
        self._step_metrics.add(step)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0 and step.losses.device.type != "cpu":
            torch.get_device_module(step.losses.device).empty_cache()
        return scale.share_of(self._losses.filtered(step.loss)).to(self.args.device)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """The loss for evaluation: the model's own, or what the Trainer says.

        Raises:
            ValueError: The model returns a tensor, of which Trainer would take the first row for the loss, and the
                others for the predictions. Without an objective it would not train, so it is noticed here only.
        """
        if not return_outputs:
            return super().compute_loss(model, inputs, **kwargs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if isinstance(outputs, Tensor) and loss.data_ptr() == outputs.data_ptr():
            raise ValueError(
                f"{type(unwrapped(model)).__name__} returned a tensor, of which Trainer takes the first row for the "
                'evaluation loss: let its forward return {"loss": ..., "logits": ...} when it is given labels'
            )
        return loss, outputs

    def _up_to_date(self, captured: Captured) -> Captured:
        """Recorded steps of the method that there is now: hyperparameters and state are part of a recording."""
        before, now = captured.method, self.method
        return captured if before == now and before.state is now.state else Captured(now)

    def floating_point_ops(self, inputs: Any) -> Any:
        """As the Trainer's, which goes through all parameters in every step; here once for inputs of one shape."""
        if not isinstance(inputs, Mapping):
            return super().floating_point_ops(inputs)
        shapes = tuple((name, value.shape) for name, value in inputs.items() if isinstance(value, Tensor))
        if shapes not in self._operations:
            self._operations[shapes] = super().floating_point_ops(inputs)
        return self._operations[shapes]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """The micro-batches of one optimizer step, and how many instances (or target tokens) they have in all."""
        samples, _ = super().get_batch_samples(*args, **kwargs)
        # Trainer's own count is None or ignored for many heads (transformers#47688: gradients k times too large).
        batches = [self._objective_batch(inputs) for inputs in samples]
        counts = [self._count(batch) for batch in batches]
        if not counts or any(count is None for count in counts):
            return samples, None
        total = sum(counts)
        if isinstance(total, Tensor) and self.args.world_size > 1 and self.args.average_tokens_across_devices:
            # DDP takes the mean over the processes, so each is to weigh its tokens against the average number.
            total = self.accelerator.gather(total.to(self.args.device)).sum() / self.args.world_size
        with part_of_a_step(isinstance(total, Tensor) and readable(total) and bool(total > 0)):
            getattr(self._objective, "check_parts", lambda batches: None)(batches)
        return samples, total

    def _count(self, batch: Any) -> Any:
        """What the objective's mean divides by: its items (tokens), or the instances; None if that cannot be told."""
        items = getattr(self._objective, "items", None)
        found = None if items is None else items(batch)
        return batch_size(batch) if found is None else found

    def _share(self, batch: Any, total: Any) -> Any:
        """The weight of this micro-batch's mean in that of all micro-batches of the optimizer step."""
        count = None if total is None else self._count(batch)
        if count is None:
            steps = getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps)
            return 1.0 / steps
        return ratio(count, total)

    # -- logs and checkpoints ------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds what the steps since the last entry have reported."""
        if "loss" in logs:
            logs.update(self._step_metrics.drain(lambda values: self.accelerator.reduce(values, "mean")))
            if "skipped" in self.method.state:
                logs["skipped"] = self.method.skipped
        if "train_runtime" in logs:
            logs |= {"train_forwards": self.forwards, "train_backwards": self.backwards}
        super().log(logs, *args, **kwargs)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains; the method and the objective start without state, or with that of the checkpoint.

        Raises:
            LostError: A worker of the data loader, or another process of the training, has died.
            ValueError: There is no objective: none was given, and none can be inferred.
        """
        self._check_objective()
        self._operations.clear()
        with explain_worker_errors(self.resume_hint), self._losses.replaces_trainers(self.args):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        # Here and not in train(): with auto_find_batch_size a training starts over when memory runs out.
        self._load_states({"method": {}, "objective": {}, "forwards": 0, "backwards": 0})
        return super()._inner_training_loop(*args, **kwargs)

    def resume_hint(self) -> str:
        return f"train(resume_from_checkpoint=True) goes on from the last checkpoint in {self.args.output_dir}"

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with self._losses.as_given(self.args):  # they are saved with the model
            super()._save(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        objective = getattr(self._objective, "state_dict", dict)
        state = {
            "type": type(self.method).__name__,
            "processes": self.args.world_size,
            "method": self.method.state_dict(),
            "objective": objective(),
            "forwards": self.forwards,
            "backwards": self.backwards,
            "last_finite": self._losses.last,
            "largest_part": None if self.splitting is None else self.splitting.largest,
        }
        save_state(Path(output_dir), self._state_name(), state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        name, world = type(self.method).__name__, self.args.world_size
        state = load_state(Path(checkpoint), self._state_name(), self.args.device)
        if state is None:
            # The names differ with the number of processes: what another number of them has left is not "no method".
            names = ("method_state", "method_state_0")
            others = (load_state(Path(checkpoint), each, self.args.device) or {} for each in names)
            state = next((each for each in others if each.get("processes", world) != world), None)
        if state is None or state["type"] != name:
            saved = "no method" if state is None else state["type"]
            _log.warning("%s holds the state of %s; %s starts without state", checkpoint, saved, name)
        elif state.get("processes", world) != world:  # each process has a state of its own, of its data or its shards
            saved = state["processes"]
            _log.warning("%s is of %s processes, not %d; %s starts without state", checkpoint, saved, world, name)
        else:
            self._load_states(state)

    def _load_states(self, state: dict[str, Any]) -> None:
        self.method.load_state_dict(state["method"])
        if hasattr(self._objective, "load_state_dict"):
            load_objective(self._objective, state["objective"])
        self.forwards, self.backwards = state["forwards"], state["backwards"]
        if self.captured is not None:  # what was recorded with the state that was
            self.captured = Captured(self.method)
        if self.splitting is not None:
            self.splitting.largest = state.get("largest_part")  # not there in older checkpoints
        self._losses.last = state.get("last_finite")  # neither
        self._step_metrics = StepMetrics()

    def _state_name(self) -> str:
        # The processes see different data, and so may their methods remember different gradients.
        return "method_state" if self.args.world_size == 1 else f"method_state_{self.args.process_index}"


class Scale:
    """The factor on the loss of a micro-batch: its share of the batch, and the ``GradScaler`` if there is one."""

    def __init__(self, share: float | Tensor, scaler: Any) -> None:
        self._share = share
        self._scaler = scaler

    def fixed(self, device: torch.device) -> float | Tensor:
        """The whole factor as one number, which a recorded step can take as an input."""
        if self._scaler is None:
            return self._share
        return self.scale(torch.ones((), device=device))

    def share_of(self, value: Tensor) -> Tensor:
        """The value times the share, in its own type."""
        if isinstance(self._share, Tensor):
            return value * self._share.to(value.device, value.dtype)
        return value if self._share == 1 else value * self._share

    def scale(self, outputs: Tensor) -> Tensor:
        """The value times the whole factor."""
        part = self.share_of(outputs)
        scaled: Tensor = part if self._scaler is None else self._scaler.scale(part)
        return scaled
