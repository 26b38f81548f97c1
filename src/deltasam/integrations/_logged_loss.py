"""The losses that a Trainer logs: what ``logging_nan_inf_filter`` promises, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class LossFilter:
    """Replaces a loss that is not finite by the last finite one, on the device.

    ``Trainer``'s own filter asks the host in every step whether the loss is finite, so that the host waits for the
    device, and the device then for the host.

    Attributes:
        last: The last finite loss, a scalar on its device; None before the first step with the filter.

    Example:
        >>> from types import SimpleNamespace
        >>> losses, args = LossFilter(), SimpleNamespace(logging_nan_inf_filter=True)
        >>> with losses.replaces_trainers(args):
        ...     [float(losses.filtered(torch.tensor(value))) for value in (2.0, float("nan"))]
        [2.0, 2.0]
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self._filtered = False

    @contextmanager
    def replaces_trainers(self, args: Any) -> Iterator[None]:
        """Takes the place of the Trainer's filter for the length of a training; the arguments stay the user's."""
        wanted = args.logging_nan_inf_filter
        self._filtered, args.logging_nan_inf_filter = wanted, False
        try:
            yield
        finally:
            self._filtered, args.logging_nan_inf_filter = False, wanted

    @contextmanager
    def as_given(self, args: Any) -> Iterator[None]:
        """The arguments as the user gave them, for the while that they are saved."""
        now = args.logging_nan_inf_filter
        args.logging_nan_inf_filter = now or self._filtered
        try:
            yield
        finally:
            args.logging_nan_inf_filter = now

    def filtered(self, loss: Tensor) -> Tensor:
        """The loss, or the last finite one; 0 before there was any, as the Trainer's filter has it."""
        if not self._filtered:
            return loss
        last = torch.zeros_like(loss) if self.last is None else self.last.to(loss)
        self.last = torch.where(torch.isfinite(loss), loss.detach(), last)
        return self.last
