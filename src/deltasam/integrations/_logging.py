"""What a Trainer logs, kept on the device until it is read: means over the steps, and losses that are finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deltasam.methods import Step


class StepMetrics:
    """Running means of step statistics. Adding a step does not synchronize; reading the means does so once.

    ``sharpness``: how much the perturbation raised the mean loss. ``ascent_grad_norm``: norm of the gradient that the
    perturbation follows. ``radius``: norm of the perturbation. ``weights_mean``, ``weights_std``, ``weights_max``: of
    the instance weights g.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps: dict[str, int] = {}

    def add(self, step: Step) -> None:
        """Adds one step."""
        values = {}
        if step.perturbed_losses is not None:
            values["sharpness"] = step.sharpness
        if step.grad_norm is not None:
            values["ascent_grad_norm"] = step.grad_norm
        if step.radius is not None:
            values["radius"] = step.radius
        if step.weights is not None:
            values["weights_mean"] = step.weights.mean()
            values["weights_std"] = step.weights.std(unbiased=False)
            values["weights_max"] = step.weights.max()
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._steps[name] = self._steps.get(name, 0) + 1

    def drain(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Returns the means since the last call; ``reduce`` averages a tensor over the processes."""
        if not self._sums:
            return {}
        device = next(iter(self._sums.values())).device
        means = [(total / self._steps[name]).float().to(device) for name, total in self._sums.items()]
        values = dict(zip(self._sums, reduce(torch.stack(means)).tolist(), strict=True))
        self._sums, self._steps = {}, {}
        return values


class LossFilter:
    """Replaces a loss that is not finite by the last finite one, on the device.

    ``Trainer``'s own filter asks the host in every step whether the loss is finite, so the host waits for the device.
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None  # the last finite loss
        self._enabled = False

    @contextmanager
    def enabled_for(self, args: Any) -> Iterator[None]:
        """Replaces the Trainer's filter during a training; restores ``args`` afterwards."""
        wanted = args.logging_nan_inf_filter
        self._enabled, args.logging_nan_inf_filter = wanted, False
        try:
            yield
        finally:
            self._enabled, args.logging_nan_inf_filter = False, wanted

    @contextmanager
    def original_arguments(self, args: Any) -> Iterator[None]:
        """Sets ``args`` to the user's value inside, to save them."""
        now = args.logging_nan_inf_filter
        args.logging_nan_inf_filter = now or self._enabled
        try:
            yield
        finally:
            args.logging_nan_inf_filter = now

    def filtered(self, loss: Tensor) -> Tensor:
        """Returns the loss if it is finite, else the last finite one; 0 if there is none, as Trainer does."""
        if not self._enabled:
            return loss
        last = torch.zeros_like(loss) if self.last is None else self.last.to(loss)
        self.last = torch.where(torch.isfinite(loss), loss.detach(), last)
        return self.last
