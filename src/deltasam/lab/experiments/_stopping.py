"""Stops a run on SIGTERM or SIGINT, with a checkpoint to resume from."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopper(TrainerCallback):
    """On SIGTERM or SIGINT: finishes the update, writes a checkpoint and ends the training. A second one acts at once.

    Several processes all stop after the same update, whichever of them got the signal.

    Attributes:
        by: The name of the signal; None if the training has not been stopped.
    """

    def __init__(self) -> None:
        self.by: str | None = None
        self._earlier: dict[int, Any] = {}
        self._saved: int | None = None  # the update of the last checkpoint

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Installs the signal handlers; Python allows this in the main thread only."""
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ends the training if a signal has arrived."""
        if _any_process(self.by is not None, args) and state.global_step < state.max_steps:
            self.by = self.by or "a signal to another process"
            control.should_training_stop = True
            control.should_save = control.should_save or not epoch_is_over(state)  # at its end on_epoch_end saves

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Trainer calls this also when it is stopped inside an epoch: evaluation, log and checkpoint are not due then.

        An evaluation would use up the time that the process has left, and an undisturbed run would not make it.
        """
        if self.by is None:
            return
        if not epoch_is_over(state):
            control.should_evaluate = control.should_save = control.should_log = False
        else:
            control.should_save = True
        control.should_save = control.should_save and self._saved != state.global_step  # not twice

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Remembers the checkpoint."""
        self._saved = state.global_step

    def release(self) -> None:
        """Restores the signal handlers."""
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier = {}

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.by = signal.Signals(number).name
        _log.warning("%s: the run stops after this update; a second signal stops it at once", self.by)
        self.release()


def epoch_is_over(state: TrainerState) -> bool:
    """Whether the update was the last one of an epoch."""
    return state.epoch is not None and abs(state.epoch - round(state.epoch)) < 1e-6


def _any_process(flag: bool, args: TrainingArguments) -> bool:
    if args.world_size == 1:
        return flag
    stop = torch.tensor(float(flag), device=args.device)
    torch.distributed.all_reduce(stop, op=torch.distributed.ReduceOp.MAX)
    return bool(stop)
