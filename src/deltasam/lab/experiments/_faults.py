"""What a run does when it is told to stop, and when its gradients are no longer finite."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltasam.lab.experiments._errors import DivergedError
from deltasam.parallel.shards import is_shard
from deltasam.step.norms import global_norm

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
        self._saved: int | None = None  # the update of the last checkpoint

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Takes over the signals, where that is possible: in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._told) for number in _SIGNALS}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stops if it was told to."""
        if _any_process(self.by is not None, args) and state.global_step < state.max_steps:
            self.by = self.by or "a signal to another process"
            control.should_training_stop = True
            control.should_save = control.should_save or not _epoch_is_over(state)  # else it comes after the epoch

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Trainer takes the epoch for finished when it is stopped inside one: what is due after it is not due yet.

        An evaluation would take the time that the process has left, and be one that an undisturbed run does not make.
        """
        if self.by is None:
            return
        if not _epoch_is_over(state):
            control.should_evaluate = control.should_save = control.should_log = False
        else:
            control.should_save = True
        control.should_save = control.should_save and self._saved != state.global_step  # never into a finished one

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Remembers the checkpoint."""
        self._saved = state.global_step

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

    A skipped update changes no weight and no moment of the optimizer, and the schedule of the learning rate goes on.
    No checkpoint is made of weights at which the gradient is not finite.

    Cost: the norm of the gradient. torch's fused optimizers leave an update out by themselves when the device tells
    them to (``optimizer.found_inf``, made for ``GradScaler``). With them nobody waits for the device: the updates left
    out are counted there, and the count is read when a log entry, an evaluation or a checkpoint is due, and when the
    streak may have reached the limit. With other optimizers the host waits for the norm in every update.

    Args:
        last_good: Finds the checkpoint to name when the run ends.
        limit: How many updates may be skipped in a row; loss scaling needs a dozen at the start.
    """

    def __init__(self, last_good: Callable[[], Path | None], limit: int = 25) -> None:
        self._last_good = last_good
        self._limit = limit
        self._streak = 0  # as far as the host knows
        self._unseen = 0  # updates since it last looked
        self._counts: tuple[Tensor, Tensor] | None = None  # of the device: the streak, updates left out since the look
        self._told: Any = None  # the optimizer with found_inf, from before its step until after it
        self._params: list[nn.Parameter] | None = None
        self._fused: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Forgets the model and the optimizer of an earlier training, which may have ended anywhere."""
        self._release()
        self._params, self._counts, self._unseen = None, None, 0

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Looks at the gradient before the optimizer does, or lets the device look."""
        if self._params is None:  # once: to walk through the modules takes the time of a hundred kernels
            self._params = list(model.parameters())
            self._fused = skips_by_itself(optimizer) if optimizer is not None and args.world_size == 1 else None
        grads = [p.grad for p in self._params if p.grad is not None]
        finite = torch.isfinite(global_norm(grads)) if grads else None
        if self._fused is not None and finite is not None:
            self._tell(self._fused, 1 - finite.float())
            return
        self._look(state.global_step)  # an update without any gradient, between those that the device counts
        if finite is None or bool(finite):
            self._streak = 0
            return
        self._streak += 1
        _log.warning("update %d: the gradient is not finite; the update is left out", state.global_step + 1)
        self._check_limit(state.global_step + 1)
        for p in self._params:
            p.grad = None

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Takes back what was told to the optimizer: its next step may be somebody else's."""
        self._release()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Makes no checkpoint of weights at which the gradient is not finite: the last one stays a good one."""
        due = control.should_log or control.should_evaluate or control.should_save
        # After a look at a streak of s, it is limit - s updates until it can be at the limit, and not one less.
        if due or self._unseen >= self._limit - self._streak:
            self._look(state.global_step)
        control.should_save = control.should_save and self._streak == 0

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """As at the end of a step."""
        self.on_step_end(args, state, control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Tells what has not been told yet, and lets go of the model. A run without any update has diverged, too."""
        self._release()
        self._look(state.global_step)
        self._params = self._fused = None
        if state.global_step == state.max_steps == self._streak:
            raise self._diverged(f"all {self._streak} updates")

    def _tell(self, optimizer: Any, bad: Tensor) -> None:
        """The optimizer leaves its next step out where ``bad`` is 1; the device counts."""
        optimizer.found_inf, self._told = bad, optimizer
        if self._counts is None:
            self._counts = torch.full_like(bad, self._streak), torch.zeros_like(bad)
        streak, skipped = self._counts
        streak.add_(bad).mul_(bad)
        skipped.add_(bad)
        self._unseen += 1

    def _release(self) -> None:
        if self._told is not None:
            del self._told.found_inf
            self._told = None

    def _look(self, update: int) -> None:
        """Reads what the device has counted up to this update; the one place that waits for it."""
        if self._counts is None:
            return
        streak, skipped = (int(number) for number in torch.stack(self._counts).tolist())
        if skipped:
            _log.warning(
                "%d of the updates %d to %d left out: the gradient is not finite",
                skipped, update - self._unseen + 1, update,
            )  # fmt: skip
        self._streak, self._unseen, self._counts = streak, 0, None
        self._check_limit(update)

    def _check_limit(self, update: int) -> None:
        if self._streak >= self._limit:
            raise self._diverged(f"{self._streak} updates in a row, up to update {update}")

    def _diverged(self, when: str) -> DivergedError:
        good = self._last_good()
        where = f"the last good checkpoint is {good}" if good is not None else "there is no checkpoint yet"
        return DivergedError(
            f"the gradient was not finite in {when}; {where}. Lower optimizer.lr or method.rho, clip by "
            "optimizer.max_grad_norm, or use precision=fp32"
        )


def skips_by_itself(optimizer: Any) -> Any:
    """The torch optimizer in there, if it leaves a step out when the device tells it to; else None.

    That is one of torch's fused ones, all of whose parameters lie, whole, on one device, without a loss scaler, which
    uses the same way.
    """
    if getattr(optimizer, "scaler", None) is not None:
        return None
    inner = getattr(optimizer, "optimizer", optimizer)  # of Accelerate's wrapper
    # Exactly these: a class that inherits may do more than the kernel. SGD takes the momentum of its first step from
    # memory that the kernel, told to leave the step out, has not written.
    if type(inner) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return None
    if any(not group["fused"] or group.get("momentum", 0) for group in inner.param_groups):
        return None
    params = [p for group in inner.param_groups for p in group["params"]]
    devices = {p.device for p in params}
    if len(devices) != 1 or devices.pop().type not in ("cpu", "cuda") or any(is_shard(p) for p in params):
        return None
    return inner


def _epoch_is_over(state: TrainerState) -> bool:
    return state.epoch is not None and abs(state.epoch - round(state.epoch)) < 1e-6


def _any_process(flag: bool, args: TrainingArguments) -> bool:
    if args.world_size == 1:
        return flag
    told = torch.tensor(float(flag), device=args.device)
    torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX)
    return bool(told)
