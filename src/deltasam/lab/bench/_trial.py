"""The first steps of a candidate: they show that it runs, and give its passes and its approximate time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from deltasam.lab.bench._candidates import Candidate, Work
from deltasam.lab.bench._passes import PassCount, counted_passes
from deltasam.lab.bench._workbench import NO_OPTIMIZER, Workbench, adamw
from deltasam.lab.bench.options import StepOptions

IN_A_ROW = 5  # consecutive steps in a round on a GPU; as in training, the host runs ahead of the device
SLOW = 0.5  # seconds; a longer step need not be followed by another one in its round


@dataclass(frozen=True)
class Trial:
    """A candidate after its first steps."""

    entry: Candidate
    work: Work
    passes: PassCount
    seconds: float  # per step, roughly


def run_trial(entry: Candidate, options: StepOptions, bench: Workbench, counted: dict[str, PassCount]) -> Trial:
    """Builds the step and takes the first ones. Whatever the candidate raises, is raised.

    Args:
        entry: The candidate.
        options: The implementation of AdamW.
        bench: Model and batch.
        counted: The passes of methods that are known already. The candidate's are added.
    """
    work = entry.build(bench, adamw(entry.adamw or options.adamw[0]))
    for _ in range(entry.first_steps):
        work()
    known = entry.method or entry.name
    if entry.build_eager is not None and known not in counted:
        counted[known] = _passes(entry.build_eager(bench, NO_OPTIMIZER), entry.period, bench)
    bench.synchronize()
    start = time.perf_counter()
    if entry.build_eager is None:
        counted[known] = _passes(work, entry.period, bench)
    else:
        for _ in range(entry.period):
            work()
    bench.synchronize()
    return Trial(entry, work, counted[known], (time.perf_counter() - start) / entry.period)


def steps_in_a_row(trial: Trial, options: StepOptions, bench: Workbench) -> int:
    """Returns the number of consecutive steps per round, a multiple of the period."""
    on_gpu = bench.device.type == "cuda"
    if options.seconds is None:
        wanted = IN_A_ROW if on_gpu else 1
    else:
        wanted = math.ceil(options.seconds / options.rounds / max(trial.seconds, 1e-6))
        wanted = max(wanted, 2) if on_gpu and trial.seconds < SLOW else wanted
    return trial.entry.period * math.ceil(wanted / trial.entry.period)


def first_line(error: Exception) -> str:
    """Returns the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _passes(work: Work, period: int, bench: Workbench) -> PassCount:
    """Returns the mean number of passes per step over one period."""
    with counted_passes(bench.model, bench.size) as count:
        for _ in range(period):
            work()
    return PassCount(count.forwards / period, count.backwards / period)
