"""The numbers of a radius in the memory of a device, for steps that are recorded once and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deltasam.step.radius._base import Radius


class Numbers:
    """The numbers that one recorded step reads; a replay after :meth:`set` uses the new ones.

    Args:
        device: The device of the step.
        rule: The rule of the recorded step.
    """

    _current: Numbers | None = None

    def __init__(self, device: torch.device, rule: Radius) -> None:
        self._values: list[float] = [float(number) for number in rule.numbers()]
        # float64, as Python's numbers are; a result has the precision of what it is divided by.
        self._memory = torch.tensor(self._values, dtype=torch.float64, device="cpu").to(device)

    def set(self, rule: Radius) -> None:
        """Writes the numbers of a rule of the same structure, on the current stream."""
        for k, number in enumerate(rule.numbers()):
            if self._values[k] != number:
                self._memory[k].fill_(number)  # the number is an argument of the kernel: no copy to wait for
                self._values[k] = float(number)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Rules that a step reads inside have their numbers in this memory."""
        before, Numbers._current = Numbers._current, self
        try:
            yield
        finally:
            Numbers._current = before

    def bound(self, rule: Radius) -> Radius:
        """The rule with its numbers in this memory."""
        return rule.with_numbers(iter(self._memory.unbind(0)))


def on_device(rule: Radius) -> Radius:
    """The rule itself; while a step is recorded, with its numbers on the device."""
    current = Numbers._current
    return rule if current is None else current.bound(rule)
