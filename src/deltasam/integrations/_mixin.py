"""A method instead of ``loss.backward()`` in Hugging Face's ``Trainer`` and its subclasses."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from deltasam.integrations._accumulation import AccumulationMixin
from deltasam.integrations._arguments import check_method, refuse_overrides, refuse_unsupported
from deltasam.integrations._checkpoints import CheckpointMixin
from deltasam.integrations._logging import LossFilter, StepMetrics
from deltasam.integrations._objective import ObjectiveMixin
from deltasam.integrations._step import StepMixin
from deltasam.integrations._worker_errors import explain_worker_errors
from deltasam.methods import Method
from deltasam.objectives.batch import unwrapped
from deltasam.speed.capture import Captured
from deltasam.speed.splitting import OnOutOfMemory, Splitting, check_out_of_memory
from deltasam.step.passes import ObjectiveLike


class MethodMixin(StepMixin, AccumulationMixin, ObjectiveMixin, CheckpointMixin):
    """Makes a ``Trainer`` use a method: put it before the ``Trainer`` in the bases of your class.

    Everything else stays the Trainer's: optimizer, schedule, accumulation, clipping, mixed precision, evaluation,
    callbacks and checkpoints. Checkpoints also hold the state of the method and the objective, as JSON and
    safetensors. The evaluation loss is the model's own. ``train()`` resets the method's state unless it resumes.

    *Accumulation.* Each micro-batch has its own perturbation (m-sharpness, m = the size of a micro-batch). Whatever
    counts steps (``LookSAM``'s k, SMART's teacher) counts micro-batches. The gradients of the micro-batches are
    weighted by their number of instances, or of target tokens. For :class:`~deltasam.ERM` their sum is the gradient
    of the large batch, for every model.

    *Logging.* Adds to the Trainer's entries: ``sharpness``; ``radius``, the norm of the perturbation;
    ``ascent_grad_norm``, the norm of the gradient that the perturbation follows (``grad_norm`` is still that of the
    optimizer's gradient); ``weights_mean``, ``weights_std`` and ``weights_max`` of the instance weights g. Each is a
    mean over the steps since the last entry. ``skipped`` is the number of steps so far without a perturbation. The
    last entry has ``train_forwards`` and ``train_backwards``, the total number of passes.

    *Schedules.* A :class:`~deltasam.Scheduled` radius follows the steps, epochs and learning rate of the Trainer. A
    callback may also replace the method: ``trainer.method = trainer.method.replace(rho=...)``.

    *Synchronization.* Steps do not wait for the device; only log entries, evaluations and checkpoints do. Batches are
    copied to a GPU asynchronously. ``args.logging_nan_inf_filter`` works on the device: a loss that is not finite is
    logged as the last finite one.

    *Mixed precision.* The objective runs inside the autocast region, as in a plain PyTorch loop. The model's outputs
    are float32.

    *Your own Trainer.* A Trainer with its own ``compute_loss`` returns one loss for the batch, so say which losses the
    instances have: pass ``objective=``, or override :meth:`default_objective`. If it also has its own
    ``training_step``, name it in the class attribute ``replaces``: the step of the method takes its place. Evaluation
    still uses its ``compute_loss``. For example::

        class Mine(MethodMixin, MyTrainer):
            replaces = (MyTrainer,)

            def default_objective(self):
                return lambda model, inputs: ...  # losses of shape (N,)

    Args:
        *args: The Trainer's arguments.
        method: The method that computes the gradients, for example ``DeltaSAM(rho=0.05)``.
        objective: ``objective(model, batch) -> (N,)``. By default it is inferred from the model's head, its problem
            type and the label names, with ``args.label_smoothing_factor``. If it is a module with trainable weights,
            pass these to the optimizer, ``optimizers=(..., None)``; checkpoints hold them, clipping ignores them.
        capture: Record steps as CUDA graphs, one per batch shape, see :class:`~deltasam.speed.capture.Captured`. Use
            few shapes: ``DataCollatorWithPadding(tokenizer, pad_to_multiple_of=32)``. No effect on the CPU.
        on_out_of_memory: ``"stop"`` raises an error that names the pass and what to reduce. ``"split"`` repeats the
            step with the batch in halves, see :class:`~deltasam.speed.splitting.Splitting`; in one process only.
        **kwargs: The Trainer's keyword arguments.

    Raises:
        TypeError: ``method`` is not a method, or ``objective`` is not an objective.
        ValueError: The Trainer has a setting that no method works with. If the objective cannot be inferred,
            ``train()`` raises this error: evaluation and prediction need no objective.
    """

    method: Method
    replaces: ClassVar[tuple[type, ...]] = ()
    """Trainers whose ``training_step`` your class replaces by the step of the method."""

    def __init__(
        self,
        *args: Any,
        method: Method = None,  # type: ignore[assignment]  # required; check_method names it if it is missing
        objective: ObjectiveLike | None = None,
        capture: bool = False,
        on_out_of_memory: OnOutOfMemory = "stop",
        **kwargs: Any,
    ) -> None:
        check_method(method, type(self).__name__)
        check_out_of_memory(on_out_of_memory, capture=capture)
        has_objective = objective is not None or type(self).default_objective is not MethodMixin.default_objective
        refuse_overrides(type(self), MethodMixin, has_objective=has_objective, replaces=self.replaces)
        super().__init__(*args, **kwargs)
        refuse_unsupported(self, has_objective=objective is not None)
        if self.args.gradient_checkpointing:
            # The default of transformers 4 does not support torch.autograd.grad, which most methods call.
            options = {"use_reentrant": False, **(self.args.gradient_checkpointing_kwargs or {})}
            self.args.gradient_checkpointing_kwargs = options
            if hasattr(self.args, "activation_checkpointing_kwargs"):  # the name that transformers 5.23 reads
                self.args.activation_checkpointing_kwargs = options
        self.method = method
        self.captured = Captured(method) if capture else None
        self.splitting = Splitting(method) if on_out_of_memory == "split" else None
        self.forwards = self.backwards = 0
        self._step_metrics = StepMetrics()
        self._loss_filter = LossFilter()
        self._operations: dict[Any, Any] = {}
        self._init_objective(objective)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains. The method and the objective start without state, or with the state of the checkpoint.

        Raises:
            LostError: A worker of the data loader, or another process of the training, has died.
            ValueError: No objective was given, and none can be inferred.
        """
        self._require_objective()
        self._operations.clear()
        with explain_worker_errors(self.resume_hint), self._loss_filter.enabled_for(self.args):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def resume_hint(self) -> str:
        """Returns how to continue after a process has died."""
        return f"train(resume_from_checkpoint=True) continues from the last checkpoint in {self.args.output_dir}"

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Returns the evaluation loss, as the Trainer computes it.

        Raises:
            ValueError: The model returns no loss. Trainer would use the first part of its outputs.
        """
        if not return_outputs:
            return super().compute_loss(model, inputs, **kwargs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        is_loss = isinstance(loss, Tensor) and loss.ndim <= 1  # one, or one per instance
        if not is_loss or (isinstance(outputs, Tensor) and loss.data_ptr() == outputs.data_ptr()):
            raise ValueError(
                f"{type(unwrapped(model)).__name__} returned a {type(outputs).__name__} without a loss: return "
                '{"loss": ..., "logits": ...} from its forward when labels are given, or Trainer would use the first '
                "part of the outputs as the evaluation loss"
            )
        return loss, outputs

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, with the means over the steps since the last entry."""
        if "loss" in logs:
            logs.update(self._step_metrics.drain(lambda values: self.accelerator.reduce(values, "mean")))
            if "skipped" in self.method.state:
                logs["skipped"] = self.method.skipped
        if "train_runtime" in logs:
            logs |= {"train_forwards": self.forwards, "train_backwards": self.backwards}
        super().log(logs, *args, **kwargs)
