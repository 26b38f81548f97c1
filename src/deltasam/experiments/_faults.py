"""What a run does when it is told to stop, and when its gradients are no longer finite."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltasam.experiments._errors import DivergedError
from deltasam.perturb import global_norm

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopper(TrainerCallback):
    """On SIGTERM or SIGINT: finishes the update, writes a checkpoint and ends the training. A second one acts at once.

    Of several processes all stop after the same update, whichever of them was told.

    Attributes:
        by: The name of the signal, None if the training has not been stopped.
    """

    def __init__(self) -> None:
        self.by: str | None = None
        self._earlier: dict[int, Any] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Takes over the signals, where that is possible: in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._told) for number in _SIGNALS}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stops if it was told to."""
        if _any_process(self.by is not None, args) and state.global_step < state.max_steps:
            self.by = self.by or "a signal to another process"
            control.should_save = control.should_training_stop = True

    def release(self) -> None:
        """Gives the signals back."""
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier = {}

    def _told(self, number: int, _frame: Any) -> None:
        self.by = signal.Signals(number).name
        _log.warning("%s: the run stops after this update; the same signal again stops it at once", self.by)
        self.release()


class Guard(TrainerCallback):
    """Leaves out updates whose gradient is not finite, and ends the run when there are too many of them in a row.

    A skipped update changes no weight and no moment of the optimizer. Cost: the norm of the gradient, on the host.

    Args:
        last_good: Finds the checkpoint to name when the run ends.
        limit: How many updates may be skipped in a row; loss scaling needs a dozen at the start.
    """

    def __init__(self, last_good: Callable[[], Path | None], limit: int = 25) -> None:
        self._last_good = last_good
        self._limit = limit
        self._streak = 0

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Looks at the gradient before the optimizer does."""
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if not grads or bool(torch.isfinite(global_norm(grads))):
            self._streak = 0
            return
        self._streak += 1
        _log.warning("update %d: the gradient is not finite; the update is left out", state.global_step + 1)
        if self._streak >= self._limit:
            good = self._last_good()
            where = f"the last good checkpoint is {good}" if good is not None else "there is no checkpoint yet"
            raise DivergedError(
                f"the gradient was not finite in {self._streak} updates in a row, up to update "
                f"{state.global_step + 1}; {where}. Lower optimizer.lr or method.rho, clip by "
                "optimizer.max_grad_norm, or use precision=fp32"
            )
        for p in model.parameters():
            p.grad = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Makes no checkpoint of weights at which the gradient is not finite: the last one stays a good one."""
        control.should_save = control.should_save and self._streak == 0


def _any_process(flag: bool, args: TrainingArguments) -> bool:
    if args.world_size == 1:
        return flag
    told = torch.tensor(float(flag), device=args.device)
    torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX)
    return bool(told)
