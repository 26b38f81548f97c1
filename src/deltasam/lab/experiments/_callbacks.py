"""Callbacks of the Trainer: the log, the marks of complete checkpoints, the progress; and the clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltasam.integrations.storage import seal, write_text
from deltasam.lab.experiments._folder import COMPLETE, RunFolder
from deltasam.lab.experiments._stopping import epoch_is_over

Watch = Callable[[int, int, dict[str, float]], None]
"""Called with the update, the total number of updates and the latest log entry."""


class Clock:
    """Seconds of training and of evaluation, summed over interruptions."""

    def __init__(self) -> None:
        self.earlier = 0.0
        self.evaluating = 0.0
        self._since = time.perf_counter()

    @property
    def training(self) -> float:
        """Seconds so far, without evaluation."""
        return self.earlier + time.perf_counter() - self._since - self.evaluating

    def start(self) -> None:
        """Starts this process's clock again: what was done before is not training."""
        self._since = time.perf_counter()

    def resume(self, notes: dict[str, Any]) -> None:
        """Continues from the times noted in a checkpoint."""
        self.evaluating = float(notes["eval_seconds"])
        # `training` subtracts all evaluation, but this process's clock includes only its own: add the earlier one.
        self.earlier = float(notes["train_seconds"]) + self.evaluating


class EvaluationFirst(TrainerCallback):
    """Delays a checkpoint of the last update of an epoch until the evaluation of the epoch.

    A run that resumes from this checkpoint does not make the evaluation again.
    """

    def __init__(self) -> None:
        self._delayed = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Delays the checkpoint."""
        self._delayed = control.should_save and args.eval_strategy == "epoch" and epoch_is_over(state)
        control.should_save = control.should_save and not self._delayed

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Asks for it again; Trainer evaluates before it saves."""
        control.should_save = control.should_save or self._delayed
        self._delayed = False


class Recorder(TrainerCallback):
    """Writes ``metrics.jsonl`` and marks complete checkpoints."""

    def __init__(self, folder: RunFolder, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Starts the log with the entries of the checkpoint; later ones of an interrupted run are made again."""
        if not state.is_world_process_zero:
            return
        kept = [_line(entry) for entry in state.log_history if "train_runtime" not in entry]
        write_text(self._folder.metrics, "".join(kept))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Appends the entry."""
        entry = state.log_history[-1]
        if "train_runtime" not in entry and state.is_world_process_zero:
            with self._folder.metrics.open("a", encoding="utf-8") as file:
                file.write(_line(entry))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Logs at every checkpoint, so that a resumed run averages over the same steps."""
        control.should_log = control.should_log or control.should_save

    on_epoch_end = on_step_end

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Marks the checkpoint once every process has written its part."""
        if args.world_size > 1:
            torch.distributed.barrier()
        if not state.is_world_process_zero:
            return
        checkpoint = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        times = {"train_seconds": self._clock.training, "eval_seconds": self._clock.evaluating}
        seal(checkpoint, COMPLETE, times)


class Watcher(TrainerCallback):
    """Reports the progress of the training."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._latest: dict[str, float] = {}

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Keeps the latest values."""
        self._latest = {**self._latest, **state.log_history[-1]}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Calls ``watch``."""
        self._watch(state.global_step, state.max_steps, self._latest)


def _line(entry: dict[str, Any]) -> str:
    # Sorted, as in checkpoints: the log of an interrupted run equals that of an undisturbed one.
    return json.dumps(entry, sort_keys=True) + "\n"
