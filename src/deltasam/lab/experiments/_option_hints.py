"""Suggestions for options that were given without their section, or by the name another library uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments._parts import to_method, to_task
from deltasam.lab.experiments._sections import Batch, ModelConfig, Optimizer, Schedule
from deltasam.lab.experiments.plain import is_option
from deltasam.step.names import normalized

# Mostly the names of transformers' TrainingArguments; case and separators do not matter.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "optimizer.lr": ("learning_rate", "max_lr", "peak_lr"),
    "optimizer.eps": ("adam_epsilon",),
    "optimizer.betas": ("adam_betas", "adam_beta1", "adam_beta2"),
    "optimizer.max_grad_norm": ("clip", "grad_clip", "clip_norm", "gradient_clip_val"),
    "optimizer.weight_decay": ("decay", "wd"),
    "schedule.epochs": ("epoch", "num_epochs", "n_epochs", "num_train_epochs", "max_epochs"),
    "schedule.steps": ("max_steps", "num_steps", "n_steps", "total_steps", "train_steps", "updates"),
    "schedule.warmup": ("warmup_ratio", "warmup_share", "warm_up"),
    "schedule.warmup_steps": ("num_warmup_steps", "warmup_updates"),
    "schedule.kind": ("scheduler", "lr_scheduler", "lr_schedule", "lr_scheduler_type"),
    "batch.size": ("bs", "train_batch_size", "per_device_train_batch_size"),
    "batch.eval_size": ("eval_batch_size", "per_device_eval_batch_size"),
    "batch.accumulation": ("gradient_accumulation", "grad_accumulation", "gradient_accumulation_steps"),
    "batch.drop_last": ("dataloader_drop_last",),
    "task.max_length": ("max_len", "max_seq_len", "max_seq_length", "sequence_length", "seq_length", "length"),
    "method.rho": ("radius", "sam_rho", "perturbation_radius"),
    "model": ("model_name", "model_name_or_path", "pretrained"),
    "task": ("task_name", "dataset_name"),
    "method": ("method_name", "algorithm"),
    "regularisers": ("regularizer", "regularizers", "regulariser", "regularization"),
    "precision": ("fp32", "tf32", "fp16", "bf16", "dtype", "amp", "mixed_precision"),
    "seed": ("seeds", "random_seed", "data_seed", "manual_seed"),
    "workers": ("num_workers", "dataloader_num_workers"),
    "evaluate_every": ("eval_every", "eval_steps", "eval_strategy", "evaluation_strategy"),
    "checkpoint_every": ("save_every", "save_steps", "save_strategy", "checkpoint_steps"),
    "data": ("data_dir", "data_path", "data_folder"),
}
_BY_NAME = {normalized(name): place for place, names in OTHER_NAMES.items() for name in names}


def option_hint(option: str, given: Mapping[str, Any]) -> str:
    """Returns ``did you mean schedule.epochs?`` for an option without its section or by another name; else ``""``.

    Args:
        option: The unknown option: ``epochs``, ``batch_size`` (section and option in one), ``learning_rate``.
        given: The configuration of the run; its task and method decide which options these two have.
    """
    kinds: dict[str, type] = {"model": ModelConfig, "optimizer": Optimizer, "schedule": Schedule, "batch": Batch}
    chosen: tuple[tuple[str, Callable[[Any], object]], ...] = (("method", to_method), ("task", to_task))
    for section, to_part in chosen:
        with suppress(ConfigError):  # mistakes in the section itself are reported once this one is fixed
            kinds[section] = type(to_part(given.get(section)))
    for section, kind in kinds.items():
        # Not `name`: it selects the task or method, and may equally be meant for the model or the optimizer.
        for name in (f.name for f in dataclasses.fields(kind) if f.name != "name" and is_option(f)):
            if normalized(option) in (normalized(name), normalized(section + name)):
                return f"did you mean {section}.{name}?"
    place = _BY_NAME.get(normalized(option))
    return f"did you mean {place}?" if place is not None else ""
