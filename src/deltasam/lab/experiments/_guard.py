"""Skips updates whose gradient is not finite, and ends a run that has diverged."""

from __future__ import annotations

import logging
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


class Guard(TrainerCallback):
    """Skips updates whose gradient is not finite, and ends the run when too many are skipped in a row.

    A skipped update changes no weight and no moment of the optimizer; the learning rate schedule continues. No
    checkpoint is made of weights at which the gradient is not finite.

    Cost: the norm of the gradient. torch's fused optimizers can skip an update on the device
    (``optimizer.found_inf``, made for ``GradScaler``). With them the host does not wait: skipped updates are counted
    on the device, and the count is read when a log entry, an evaluation or a checkpoint is due, and when the streak
    may have reached the limit. With other optimizers the host waits for the norm in every update.

    Args:
        last_good: Returns the checkpoint to name when the run ends.
        limit: Number of skipped updates in a row that ends the run; loss scaling needs a dozen at the start.
    """

    def __init__(self, last_good: Callable[[], Path | None], limit: int = 25) -> None:
        self._last_good = last_good
        self._limit = limit
        self._streak = 0  # skipped updates in a row, as of the last read
        self._unseen = 0  # updates since the last read
        self._counts: tuple[Tensor, Tensor] | None = None  # on the device: the streak, skips since the last read
        self._flagged: Any = None  # the optimizer whose found_inf is set, during its step
        self._params: list[nn.Parameter] | None = None
        self._fused: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Resets the state of an earlier training, which may have ended anywhere."""
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
        """Checks the gradient before the optimizer uses it, on the device if possible."""
        if self._params is None:  # once: walking through the modules costs as much as a hundred kernels
            self._params = list(model.parameters())
            self._fused = fused_optimizer(optimizer) if optimizer is not None and args.world_size == 1 else None
        grads = [p.grad for p in self._params if p.grad is not None]
        finite = torch.isfinite(global_norm(grads)) if grads else None
        if self._fused is not None and finite is not None:
            self._flag(self._fused, 1 - finite.float())
            return
        self._read_counts(state.global_step)  # after updates that the device counted
        if finite is None or bool(finite):
            self._streak = 0
            return
        self._streak += 1
        _log.warning("update %d: the gradient is not finite; the update is skipped", state.global_step + 1)
        self._check_limit(state.global_step + 1)
        for p in self._params:
            p.grad = None

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Clears ``found_inf``: the next step of the optimizer may be outside of this training."""
        self._release()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Prevents a checkpoint of weights at which the gradient is not finite."""
        due = control.should_log or control.should_evaluate or control.should_save
        # From a streak of s, the limit is reached after limit - s updates at the earliest.
        if due or self._unseen >= self._limit - self._streak:
            self._read_counts(state.global_step)
        control.should_save = control.should_save and self._streak == 0

    on_epoch_end = on_step_end

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Reports the last counts and releases the model. A run whose updates were all skipped has diverged."""
        self._release()
        self._read_counts(state.global_step)
        self._params = self._fused = None
        if state.global_step == state.max_steps == self._streak:
            raise self._diverged(f"all {self._streak} updates")

    def _flag(self, optimizer: Any, bad: Tensor) -> None:
        """Makes the optimizer skip its next step if ``bad`` is 1, and counts on the device."""
        optimizer.found_inf, self._flagged = bad, optimizer
        if self._counts is None:
            self._counts = torch.full_like(bad, self._streak), torch.zeros_like(bad)
        streak, skipped = self._counts
        streak.add_(bad).mul_(bad)
        skipped.add_(bad)
        self._unseen += 1

    def _release(self) -> None:
        if self._flagged is not None:
            del self._flagged.found_inf
            self._flagged = None

    def _read_counts(self, update: int) -> None:
        """Reads the counts of the device up to this update; the only place that waits for it."""
        if self._counts is None:
            return
        streak, skipped = (int(number) for number in torch.stack(self._counts).tolist())
        if skipped:
            _log.warning(
                "%d of the updates %d to %d skipped: the gradient is not finite",
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


def fused_optimizer(optimizer: Any) -> Any:
    """Returns torch's optimizer inside a wrapper if it can skip a step on the device; else None.

    torch's fused optimizers can, if all parameters are unsharded on one device and there is no loss scaler, which
    uses the same attribute.
    """
    if getattr(optimizer, "scaler", None) is not None:
        return None
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    # Exactly these: a subclass may do more than the kernel. SGD with momentum would read a buffer that the kernel has
    # not written if the first step is skipped.
    if type(inner) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return None
    if any(not group["fused"] or group.get("momentum", 0) for group in inner.param_groups):
        return None
    params = [p for group in inner.param_groups for p in group["params"]]
    devices = {p.device for p in params}
    if len(devices) != 1 or devices.pop().type not in ("cpu", "cuda") or any(is_shard(p) for p in params):
        return None
    return inner
