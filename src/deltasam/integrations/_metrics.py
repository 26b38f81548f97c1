"""Means over the steps since the last log entry, kept on the device until they are read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deltasam.methods import Step


class StepMetrics:
    """Running means of step statistics. Adding a step does not synchronize; reading the means does so once.

    ``sharpness``: how much the perturbation raised the mean loss. ``ascent_grad_norm``: norm of the gradient that the
    perturbation follows. ``weights_mean``, ``weights_std``, ``weights_max``: of the instance weights g.
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
