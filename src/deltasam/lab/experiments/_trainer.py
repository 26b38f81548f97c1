"""The trainer of a run: :class:`~deltasam.integrations.MethodTrainer`, evaluated by the task."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerControl, TrainingArguments

from deltasam.integrations import MethodTrainer
from deltasam.lab.experiments._callbacks import Clock
from deltasam.lab.experiments._config import RunConfig
from deltasam.lab.experiments._errors import ConfigError

LOG_ENTRIES = 40  # per run: enough for a curve; each one waits for the device
_SCHEDULERS = {
    "polynomial": "polynomial",
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant_with_warmup",
}


class RunTrainer(MethodTrainer):
    """A MethodTrainer that evaluates the metrics of the task and measures the time."""

    def __init__(self, *args: Any, config: RunConfig, tokenizer: Any, clock: Clock, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._config = config
        self._tokenizer = tokenizer
        self._clock = clock
        self.evaluated_at: int | None = None

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Returns all metrics of the task on the evaluation rows."""
        start = time.perf_counter()
        size = self._config.batch.eval_size
        found = self._config.task.evaluate(self.model, self._tokenizer, self.eval_dataset, batch_size=size)
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self._clock.evaluating += time.perf_counter() - start
        self.evaluated_at = self.state.global_step
        self.log(dict(metrics))
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def whole_weights(self) -> dict[str, Any] | None:
        """Returns the weights to save, gathered if they are sharded: all processes must call this."""
        if not self.is_fsdp_enabled:
            return None  # save_pretrained takes the model's own
        found: dict[str, Any] = self.accelerator.get_state_dict(self.model)
        return found

    def resume_hint(self) -> str:
        """Returns the advice for a run in which a process has died."""
        return "Start the run again to resume from its last complete checkpoint"

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Returns the parameters with weight decay: all, or all except biases and normalisation layers."""
        if self._config.optimizer.decay_all:
            return [name for name, _ in model.named_parameters()]
        names: list[str] = super().get_decay_parameter_names(model)
        return names


def arguments(config: RunConfig, total: int, output: Path, *, tensorboard: bool) -> TrainingArguments:
    """Translates the configuration to arguments of the Trainer."""
    optimizer, schedule = config.optimizer, config.schedule
    decay = {"lr_end": schedule.lr_end, "power": 1.0} if schedule.kind == "polynomial" else {}
    try:
        return TrainingArguments(
            output_dir=str(output),
            seed=config.seed,
            max_steps=total,
            per_device_train_batch_size=_per_process(config.batch.size),
            gradient_accumulation_steps=config.batch.accumulation,
            use_cpu=_processes() > 1 and not torch.accelerator.is_available(),  # else Trainer ignores other processes
            dataloader_drop_last=config.batch.drop_last,
            dataloader_num_workers=config.workers,
            learning_rate=optimizer.lr,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_epsilon=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
            lr_scheduler_type=_SCHEDULERS[schedule.kind],
            lr_scheduler_kwargs=decay,
            warmup_steps=schedule.warmup_of(total),
            bf16=config.precision == "bf16",
            fp16=config.precision == "fp16",
            logging_steps=max(1, total // LOG_ENTRIES),
            report_to=["tensorboard"] if tensorboard else "none",
            save_total_limit=2,
            remove_unused_columns=False,
            disable_tqdm=True,
            **_event_files(output.parent / "tensorboard"),
            **_cadence("eval", config.evaluate_every),
            **_cadence("save", config.checkpoint_every),
        )
    except ValueError as error:
        raise ConfigError(f"precision={config.precision}: {error}") from error


def _event_files(folder: Path) -> dict[str, str]:
    """Sets the folder of TensorBoard files: an option before transformers 5, a variable since (see ``_run.py``)."""
    return {"logging_dir": str(folder)} if "logging_dir" in TrainingArguments.__dataclass_fields__ else {}


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _per_process(size: int) -> int:
    """Returns the share of a batch per process of ``torchrun``: the run is the same for any number of processes."""
    world = _processes()
    if size % world:
        raise ConfigError(f"batch.size={size} is not divisible by {world} processes; choose a multiple of {world}")
    return size // world


def _cadence(what: str, every: str | int) -> dict[str, Any]:
    if isinstance(every, int):
        return {f"{what}_strategy": "steps", f"{what}_steps": every}
    return {f"{what}_strategy": "epoch" if every == "epoch" else "no"}
