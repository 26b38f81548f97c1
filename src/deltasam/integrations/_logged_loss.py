"""The losses that a Trainer logs: ``logging_nan_inf_filter`` without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class LossFilter:
    """Replaces a loss that is not finite by the last finite one, on the device.

    ``Trainer``'s own filter asks the host in every step whether the loss is finite, so the host waits for the device.

    Attributes:
        last: The last finite loss, a scalar on its device; None before the first filtered step.

    Example:
        >>> from types import SimpleNamespace
        >>> losses, args = LossFilter(), SimpleNamespace(logging_nan_inf_filter=True)
        >>> with losses.enabled_for(args):
        ...     [float(losses.filtered(torch.tensor(value))) for value in (2.0, float("nan"))]
        [2.0, 2.0]
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None
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
