"""An average of the weights (EMA, SWA) in Hugging Face's trainers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltasam.integrations._state import load_state, save_state
from deltasam.step.averaging import WeightAverage, restore, trained_weights

_FILE = "weight_average"


class WeightAverageCallback(TrainerCallback):
    """Evaluates and keeps an average of the weights: for Hugging Face's ``Trainer``, ours, TRL's and others.

    The optimizer trains the weights as it would without the callback. Evaluations during training see the average,
    checkpoints hold it as the weights of the model (so ``load_best_model_at_end`` keeps the best average), and after
    ``train()`` the model has it. A checkpoint also holds the trained weights, in ``weight_average.safetensors``; a
    resumed training equals an uninterrupted one.

    It averages after every update. Before the start of the average (``start`` of SWA) the weights are the trained
    ones. FSDP and DeepSpeed, which shard the weights, and schedule-free optimizers, which average on their own, raise
    an error. Put it behind callbacks that ask for evaluations or checkpoints: it looks for them at the end of a step.

    Cost: one copy of the trained parameters, a second one during evaluations and checkpoints; see
    :class:`~deltasam.WeightAverage`.

    Args:
        average: The kind of average and its options; ``total_steps`` is that of the Trainer unless it is set.
        checkpoint: The folder to resume from, if it is not ``checkpoint-<step>`` in ``args.output_dir``.

    Attributes:
        average: The average of the present training.

    Example:
        >>> import tempfile, torch
        >>> from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
        >>> from deltasam import WeightAverage
        >>> sizes = {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 4}
        >>> model = BertForSequenceClassification(BertConfig(vocab_size=9, **sizes))
        >>> data = [{"input_ids": torch.tensor([1, i]), "labels": i % 2} for i in range(8)]
        >>> args = TrainingArguments(tempfile.mkdtemp(), max_steps=4, report_to="none", disable_tqdm=True)
        >>> callback = WeightAverageCallback(WeightAverage(kind="swa", start=0.5))
        >>> output = Trainer(model, args, train_dataset=data, callbacks=[callback]).train()  # doctest: +ELLIPSIS
        {...}
        >>> callback.average.count
        2
    """

    def __init__(self, average: WeightAverage, *, checkpoint: str | Path | None = None) -> None:
        self.average = self._options = average
        self._checkpoint = checkpoint
        self._trained: dict[str, Tensor] | None = None  # while the model holds the average

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Starts a new average, or continues that of the checkpoint.

        Raises:
            ValueError: The weights are sharded, or the optimizer changes them for evaluations.
            FileNotFoundError: The training resumes from a checkpoint without an average.
        """
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise ValueError("WeightAverageCallback: fsdp and deepspeed shard the weights; use DDP, or one process")
        inner = getattr(optimizer, "optimizer", optimizer)  # without Accelerate's wrapper, which always has modes
        if callable(getattr(inner, "eval", None)):
            raise ValueError(
                f"WeightAverageCallback does not work with {type(inner).__name__}, whose eval() and train() move the "
                "weights to an average of its own and back: leave the callback out, or use another optimizer"
            )
        self._trained = None
        self.average = dataclasses.replace(self._options, total_steps=self._options.total_steps or state.max_steps)
        if state.global_step:
            self._resume(args, state, model)
            if args.eval_on_start:
                self._show(model)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Continues from the trained weights."""
        if self._trained is not None:
            restore(model, self._trained)
            self._trained = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Updates the average, and puts it into the model if an evaluation or a checkpoint follows."""
        self.average.update(model)
        self.on_epoch_end(args, state, control, model)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Puts the average into the model if an evaluation or a checkpoint follows."""
        if self._trained is None and (control.should_evaluate or control.should_save):
            self._show(model)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Adds the trained weights and the average to the checkpoint."""
        if state.is_hyper_param_search:  # its checkpoints are in folders of the trials, which do not resume
            return
        if state.is_world_process_zero and not args.save_only_model:
            trained = trained_weights(model) if self._trained is None else self._trained
            save_state(_folder(args, state), _FILE, {"trained": trained, "average": self.average.state_dict()})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Leaves the average in the model; with ``load_best_model_at_end`` the Trainer has loaded the best one."""
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            self.average.copy_to(model)
        self._trained = None

    def _show(self, model: Any) -> None:
        """Puts the average into the model until the next step begins."""
        self._trained = {name: p.clone() for name, p in trained_weights(model).items()}
        self.average.copy_to(model)

    def _resume(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        folder = Path(self._checkpoint) if self._checkpoint is not None else _folder(args, state)
        found = load_state(folder, _FILE, args.device)
        if found is None:
            raise FileNotFoundError(
                f"{folder / _FILE}.json does not exist, so the average cannot continue: name the checkpoint that the "
                "training resumes from, WeightAverageCallback(..., checkpoint=...), or start without resuming"
            )
        restore(model, found["trained"])
        self.average.load_state_dict(found["average"])


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
