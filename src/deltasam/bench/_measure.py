"""From options to numbers."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import torch

from deltasam import __version__
from deltasam.bench import isolate
from deltasam.bench._clock import Spread, interleaved, ratios
from deltasam.bench._contestants import ADAMW, BARE_SGD, Contestant, contestants
from deltasam.bench._memory import peak_bytes
from deltasam.bench._passes import counted_passes
from deltasam.bench._workbench import Workbench, set_up
from deltasam.bench.options import StepOptions
from deltasam.bench.report import Report, Row


def measure(options: StepOptions, field: Sequence[Contestant] | None = None) -> Report:
    """Runs the measurement.

    Args:
        options: What to measure.
        field: The contestants, ERM and SAM first; those the options name by default.

    Returns:
        One row per contestant.
    """
    bench = set_up(options)
    rows, failures = (_isolated(options, bench), {}) if options.isolate else _steps(options, bench, field)
    return Report(options=options, rows=tuple(rows), failures=failures, machine=_machine(bench))


def _steps(
    options: StepOptions, bench: Workbench, field: Sequence[Contestant] | None
) -> tuple[list[Row], dict[str, str]]:
    entries = list(field or _all(options))
    failures = {entry.name: why for entry in entries if (why := _failure(entry, bench))}
    entries = [entry for entry in entries if entry.name not in failures]
    works = {entry.name: entry.build(bench, ADAMW) for entry in entries}
    seconds = interleaved(
        works,
        rounds=options.rounds,
        warmup=options.warmup,
        clock=options.clock,
        synchronize=bench.synchronize,
        repeats={entry.name: entry.period * _turns(entry, bench) for entry in entries},
    )
    works.clear()  # frees the optimizers' states before memory is measured
    peaks = {entry.name: _peak(entry, bench) for entry in entries} if options.memory else {}
    rows = []
    for entry in entries:
        forwards, backwards = _passes(entry, bench)
        rows.append(
            Row(
                name=entry.name,
                origin=entry.origin,
                seconds=Spread.of(seconds[entry.name]),
                times_erm=ratios(seconds, entry.name, "ERM"),
                times_sam=ratios(seconds, entry.name, "SAM"),
                forwards=forwards,
                backwards=backwards,
                extra_copies=(peaks[entry.name] - peaks["ERM"]) / bench.parameter_bytes if peaks else None,
                peak_bytes=peaks.get(entry.name),
            )
        )
    return rows, failures


def _all(options: StepOptions) -> list[Contestant]:
    embeddings = options.model != "mlp"
    return contestants(options.methods, ways=options.ways, with_field=options.field, embeddings=embeddings)


def _turns(entry: Contestant, bench: Workbench) -> int:
    """Steps in a turn. On a GPU several, as in training: the host prepares the next step while the device works."""
    return -(-5 // entry.period) if bench.device.type == "cuda" else 1


def _failure(entry: Contestant, bench: Workbench) -> str | None:
    """Why this contestant cannot run here (memory, a precision its authors did not think of), or None if it can.

    One that cannot must not cost the others their results; ERM and SAM, which all are compared with, must run.
    """
    bench.model.zero_grad()
    try:
        entry.build(bench, BARE_SGD)()
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        if entry.name in ("ERM", "SAM"):
            raise
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


def _isolated(options: StepOptions, bench: Workbench) -> list[Row]:
    seconds = isolate.run(options, bench)
    return [
        Row(
            name=name,
            origin="deltasam" if name == isolate.OURS else "field",
            seconds=Spread.of(seconds[name]),
            times_ours=ratios(seconds, name, isolate.OURS),
        )
        for name in seconds
    ]


def _peak(entry: Contestant, bench: Workbench) -> int:
    """Peak memory from a fresh start over one period and a step, so that what is kept between steps counts too."""

    def work() -> None:
        step = entry.build(bench, BARE_SGD)
        for _ in range(max(entry.period + (entry.period > 1), 3 if "captured" in entry.name else 1)):
            step()

    bench.model.zero_grad()
    return peak_bytes(work, bench.device)


def _passes(entry: Contestant, bench: Workbench) -> tuple[float, float]:
    """Forward and backward passes of a step, on average over one period."""
    step = (entry.ordinary or entry.build)(bench, BARE_SGD)  # a replayed graph calls no hooks
    with counted_passes(bench.model, bench.size) as count:
        for _ in range(entry.period):
            step()
    return count.forwards / entry.period, count.backwards / entry.period


def _machine(bench: Workbench) -> dict[str, str]:
    on_gpu = bench.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(bench.device) if on_gpu else f"{platform.machine()} CPU",
        "threads": str(torch.get_num_threads()),
        "load": "" if on_gpu or not hasattr(os, "getloadavg") else f"{os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "deltasam": __version__,
        "parameters": str(sum(p.numel() for p in bench.model.parameters())),
    }
