"""Where the training is, as far as a schedule needs to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where the training is.

    Attributes:
        step: Number of the step, from 0.
        total: Number of steps of the training.
        epoch: Passes over the data so far, with a fraction.
        lr: The learning rate relative to its peak.
    """

    step: int = 0
    total: int | None = None
    epoch: float | None = None
    lr: float | None = None
