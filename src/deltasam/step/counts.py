"""What an objective counts in a batch (``items``, for example target tokens), and the shares of micro-batches.

An objective may return Python numbers, which differ from step to step. A recorded step would repeat those of the
recording, so it reads them from the memory of the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deltasam.step.batches import shares


def counts_of(objective: Any, batches: Sequence[Any]) -> list[Any] | None:
    """``objective.items`` of every batch; None if it does not exist, or does not count one of them.

    Raises:
        RuntimeError: A step is recorded, and the objective counts on the host.
    """
    items = getattr(objective, "items", lambda batch: None)
    counts = [items(batch) for batch in batches]
    if any(count is None for count in counts):
        return None
    if HostShares.current is not None and not all(isinstance(count, Tensor) for count in counts):
        raise RuntimeError(
            f"{type(objective).__name__}.items returned the number {counts[0]!r} for a part of a batch, which a "
            "replay would repeat: return a tensor"
        )
    return counts


class HostShares:
    """The shares of the micro-batches of one recorded step, if the host counts them; a replay reads what is set.

    Args:
        device: The device of the step.
        values: The shares of the recorded step; None if the step computes them on the device.
    """

    current: HostShares | None = None

    def __init__(self, device: torch.device, values: list[float] | None) -> None:
        self._values = [] if values is None else [float("nan")] * len(values)
        self._memory = torch.zeros(len(self._values), dtype=torch.float64, device=device)
        self.set(values or [])

    @property
    def given(self) -> list[Tensor] | None:
        """One scalar for each micro-batch, or None."""
        return list(self._memory.unbind(0)) if self._values else None

    def set(self, values: list[float]) -> None:
        """Writes the shares of another step, on the current stream."""
        for k, share in enumerate(values):
            if self._values[k] != share:
                self._memory[k].fill_(share)  # the number is an argument of the kernel: no copy to wait for
                self._values[k] = share

    @contextmanager
    def open(self) -> Iterator[None]:
        """The step inside is recorded, and reads its shares from this memory."""
        before, HostShares.current = HostShares.current, self
        try:
            yield
        finally:
            HostShares.current = before


def host_shares(objective: Any, batches: Sequence[Any]) -> list[float] | None:
    """The shares of the micro-batches if the objective counts them on the host, else None."""
    counts = counts_of(objective, batches) if len(batches) > 1 else None
    if counts is None or any(isinstance(count, Tensor) for count in counts):
        return None
    return [float(share) for share in shares(counts)]
