"""Measures the steps of all candidates: passes, time, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from deltasam.lab.bench import isolate
from deltasam.lab.bench._candidates import Candidate, Work, candidates
from deltasam.lab.bench._clock import Spread, interleaved, ratios
from deltasam.lab.bench._facts import layers_by_form, machine
from deltasam.lab.bench._lora_steps import lora_candidates, measure_lora
from deltasam.lab.bench._memory import peak_bytes, release
from deltasam.lab.bench._passes import PassCount
from deltasam.lab.bench._trial import Trial, first_line, run_trial, steps_in_a_row
from deltasam.lab.bench._workbench import NO_OPTIMIZER, Workbench, adamw, set_up
from deltasam.lab.bench.options import StepOptions
from deltasam.lab.bench.report import Report, Row


def measure(
    options: StepOptions,
    entries: Sequence[Candidate] | None = None,
    *,
    alone: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Report:
    """Runs the benchmark and frees its memory on the device.

    Args:
        options: What to measure.
        entries: The candidates, ERM and SAM first; with ``lora``, plain LoRA first in each way. Defaults to those of
            the options.
        alone: A context for the timed rounds, for example to wait until the device is free.

    Returns:
        One row per candidate.
    """
    if options.lora:
        return measure_lora(options, entries, alone=alone)
    bench = set_up(options)
    try:
        if options.isolate:
            return Report(options=options, rows=_isolated(options, bench), failures={}, machine=machine(bench))
        rows, failures = _steps(options, bench, list(entries or _all(options)), alone)
        engine = layers_by_form(bench) if any("PerInstance" in row.name for row in rows) else None
        return Report(options=options, rows=rows, failures=failures, machine=machine(bench), engine=engine)
    finally:
        bench.close()
        release(bench.device)


def prepared(options: StepOptions, entries: Sequence[Candidate] | None = None) -> Iterator[tuple[Candidate, Work]]:
    """Yields each candidate with its step after the warm-up, for example for a profiler.

    Args:
        options: Model, batch and precision.
        entries: The candidates. Defaults to those of the options.
    """
    bench = set_up(options)
    try:
        for entry in entries or _all(options):
            work = entry.build(bench, adamw(entry.adamw or options.adamw[0]))
            for _ in range(entry.first_steps + 1):
                work()
            bench.synchronize()
            yield entry, work
            del work
            release(bench.device)
    finally:
        bench.close()
        release(bench.device)


def _steps(
    options: StepOptions,
    bench: Workbench,
    entries: Sequence[Candidate],
    alone: Callable[[], AbstractContextManager[None]],
) -> tuple[tuple[Row, ...], dict[str, str]]:
    tried, failures = _try_all(options, bench, entries)
    repeats = {name: steps_in_a_row(one, options, bench) for name, one in tried.items()}
    with alone():
        seconds = interleaved(
            {name: one.work for name, one in tried.items()},
            rounds=options.rounds,
            warmup=options.warmup,
            clock=options.clock,
            synchronize=bench.synchronize,
            repeats=repeats,
        )
    passes = {name: one.passes for name, one in tried.items()}
    kept = [one.entry for one in tried.values()]
    tried.clear()  # frees CUDA graphs and optimizer states before memory is measured
    peaks = _peaks(kept, bench) if options.memory else {}
    rows = []
    for entry in kept:
        name, peak, plain = entry.name, peaks.get(entry.name), peaks.get("ERM")
        sam = peaks.get("SAM" if entry.way == "eager" else f"SAM {entry.way}")
        rows.append(
            Row(
                name=name,
                origin=entry.origin,
                method=entry.method,
                way=entry.way,
                seconds=Spread.of(seconds[name]),
                times_erm=ratios(seconds, name, "ERM"),
                times_sam=ratios(seconds, name, "SAM"),
                forwards=passes[name].forwards,
                backwards=passes[name].backwards,
                extra_copies=None if peak is None or plain is None else (peak - plain) / bench.parameter_bytes,
                peak_bytes=peak,
                memory_times_sam=None if peak is None or sam is None else peak / sam,
                in_a_row=repeats[name],
                rounds=tuple(seconds[name]),
            )
        )
    return tuple(rows), failures


def _all(options: StepOptions) -> list[Candidate]:
    if options.lora:
        return lora_candidates(options)
    return candidates(
        options.methods,
        ways=options.ways,
        third_party=options.third_party,
        embeddings=options.model != "mlp",
        adamw=options.adamw[1:],
        accumulate=options.accumulate,
    )


def _try_all(
    options: StepOptions, bench: Workbench, entries: Sequence[Candidate]
) -> tuple[dict[str, Trial], dict[str, str]]:
    """Takes the first steps of all candidates. Records those that fail, except ERM and SAM, which must run."""
    tried: dict[str, Trial] = {}
    failures: dict[str, str] = {}
    counted: dict[str, PassCount] = {}
    for entry in entries:
        bench.model.zero_grad()
        try:
            tried[entry.name] = run_trial(entry, options, bench, counted)
        except Exception as error:  # third-party code can raise anything
            if entry.name in ("ERM", "SAM"):
                raise
            failures[entry.name] = first_line(error)
            release(bench.device)
    return tried, failures


def _isolated(options: StepOptions, bench: Workbench) -> tuple[Row, ...]:
    seconds = isolate.run(options, bench)
    return tuple(
        Row(
            name=name,
            origin="deltasam" if name == isolate.OURS else "third_party",
            seconds=Spread.of(seconds[name]),
            times_ours=ratios(seconds, name, isolate.OURS),
            rounds=tuple(seconds[name]),
        )
        for name in seconds
    )


def _peaks(entries: Sequence[Candidate], bench: Workbench) -> dict[str, int]:
    """Returns the peak memory over a period and some steps, so that state between steps counts, too."""
    peaks = {}
    for entry in entries:
        if entry.adamw is not None:  # memory is measured without an optimizer
            continue

        def work(entry: Candidate = entry) -> Work:
            step = entry.build(bench, NO_OPTIMIZER)
            for _ in range(max(entry.first_steps, entry.period + 1, 3)):
                step()
            return step

        bench.model.zero_grad()
        try:
            peaks[entry.name] = peak_bytes(work, bench.device)
        except RuntimeError:  # out of memory: only this value is missing
            release(bench.device)
    return peaks
