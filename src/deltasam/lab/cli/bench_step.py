"""``deltasam bench step``: the options are those of :mod:`deltasam.lab.bench.options`."""

from __future__ import annotations

from dataclasses import dataclass

from deltasam.lab.bench.options import StepOptions
from deltasam.lab.cli._errors import InputError


@dataclass(frozen=True, kw_only=True)
class BenchStep(StepOptions):
    """Measures a training step of every method: time, forward and backward passes, peak memory."""

    def run(self) -> None:
        """Measures, prints the table and writes the files."""
        from deltasam.lab.bench import step

        try:
            step.run(self)
        except ValueError as error:
            raise InputError(str(error)) from error
