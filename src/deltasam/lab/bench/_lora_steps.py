"""Measures LoRA steps: each method alone in memory, and timed in turn with plain LoRA, run in the same way."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from deltasam.lab.bench._candidates import Candidate, Work, named, of_method
from deltasam.lab.bench._clock import Spread, interleaved, ratios
from deltasam.lab.bench._facts import machine
from deltasam.lab.bench._memory import Peak, peak_of_steps, release
from deltasam.lab.bench._passes import PassCount
from deltasam.lab.bench._trial import Trial, first_line, run_trial, steps_in_a_row
from deltasam.lab.bench._workbench import Optimizer, Workbench, adamw, set_up
from deltasam.lab.bench.options import StepOptions
from deltasam.lab.bench.report import PLAIN_LORA, Report, Row
from deltasam.lab.catalogue import METHODS
from deltasam.lab.plugins import load_plugins
from deltasam.methods import ERM
from deltasam.step.names import look_up, method_key

USUAL = ("sam:params=adapters", "per-instance-sam:params=adapters", "per-instance-sam:params=base")
ONE_PASS = ("random-perturbation:params=base", "bi-lora")
PLAIN_LOOP = "plain loop"
SLOW_ON_A_CPU = ("llama-1.1b", "llama-7b")


def lora_candidates(options: StepOptions) -> list[Candidate]:
    """Returns, for each way, plain LoRA and the methods; and a loop without this package, which runs eagerly."""
    load_plugins()
    names = options.methods or (
        *USUAL,
        *(name for name in ONE_PASS if look_up(METHODS, name.partition(":")[0], method_key)),
    )
    chosen = [name for name in dict.fromkeys(names) if method_key(name) != "erm"]
    found: list[Candidate] = []
    for way in dict.fromkeys(options.ways):
        found.append(of_method(ERM, PLAIN_LORA, way=way))
        if way == "eager":
            found.append(plain_loop())
        found += [named(name, way) for name in chosen]
    return list({each.name: each for each in found}.values())


def plain_loop() -> Candidate:
    """Returns the loop that a user of PEFT writes: the model's own loss, ``loss.backward()``, AdamW."""

    def build(bench: Workbench, optimizer: Optimizer) -> Work:
        stepper = optimizer.over(bench.model)

        def work() -> None:
            with bench.precision():
                loss = bench.model(**bench.batch).loss
            loss.backward()
            stepper.step()
            stepper.zero_grad()

        return work

    return Candidate(PLAIN_LOOP, "third_party", build, method=PLAIN_LOOP)


@dataclass(frozen=True)
class _Cell:
    """What was measured of one candidate."""

    entry: Candidate
    peak: Peak | None
    resident: int
    passes: PassCount
    in_a_row: int
    seconds: list[float]
    times_plain: Spread | None


def measure_lora(
    options: StepOptions,
    entries: Sequence[Candidate] | None = None,
    *,
    alone: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Report:
    """Measures each candidate with a fresh model. One that fails, for example out of memory, leaves the others.

    Args:
        options: What to measure.
        entries: The candidates. Those named "plain LoRA" are what the others of the same way are compared with.
        alone: A context for the timed rounds.
    """
    chosen = list(entries or lora_candidates(options))  # raises before any work
    bench = set_up(options)
    facts = machine(bench)
    if bench.device.type == "cpu" and options.model in SLOW_ON_A_CPU:
        print(f"{options.model} is slow on a CPU; try --model llama-135m --batch 2 --length 64", file=sys.stderr)
    with bench.precision():  # the workspaces of matrix products stay allocated and belong to no candidate
        loss = bench.loss()
    loss.backward()  # type: ignore[no-untyped-call]
    del bench, loss
    cells: dict[str, _Cell] = {}
    failures: dict[str, str] = {}
    remarks: dict[str, str] = {}
    plain: dict[str, _Cell] = {}
    for number, entry in enumerate(chosen, 1):
        print(f"{number}/{len(chosen)} {entry.name}", file=sys.stderr, flush=True)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            try:
                cell = cells[entry.name] = _cell(options, entry, plain.get(entry.way), alone)
                if entry.method == PLAIN_LORA:
                    plain[entry.way] = cell
            except Exception as error:  # noqa: BLE001  # third-party code can raise anything
                failures[entry.name] = first_line(error)
        # A method that falls back to something slower warns, and its figures need that remark.
        for each in given:
            if each.category is UserWarning:
                remarks[entry.name] = str(each.message)
        _release()  # after the error, whose traceback keeps tensors alive
    rows = tuple(_row(cell, plain.get(cell.entry.way)) for cell in cells.values())
    return Report(options=options, rows=rows, failures=failures, machine=facts, remarks=remarks)


def _cell(
    options: StepOptions, entry: Candidate, plain: _Cell | None, alone: Callable[[], AbstractContextManager[None]]
) -> _Cell:
    bench = set_up(options)
    resident = bench.resident_bytes
    peak = _peak(options, bench, entry) if options.memory else None
    release(bench.device)
    counted: dict[str, PassCount] = {}
    pair = [entry] if plain is None else [plain.entry, entry]
    try:
        trials, seconds = _rounds(options, bench, pair, counted, alone)
        times = None if plain is None else ratios(seconds, entry.name, plain.entry.name)
    except torch.OutOfMemoryError:
        if plain is None:
            raise
        trials = {}
    if not trials:  # both do not fit together, for example two CUDA graphs: one after the other
        assert plain is not None
        release(bench.device)
        trials, seconds = _rounds(options, bench, [entry], counted, alone)
        times = Spread.of([Spread.of(seconds[entry.name]).median / Spread.of(plain.seconds).median])
    in_a_row = steps_in_a_row(trials[entry.name], options, bench)
    return _Cell(entry, peak, resident, trials[entry.name].passes, in_a_row, seconds[entry.name], times)


def _peak(options: StepOptions, bench: Workbench, entry: Candidate) -> Peak:
    def steps() -> Work:
        step = entry.build(bench, adamw(entry.adamw or options.adamw[0]))
        for _ in range(max(entry.first_steps, entry.period + 1, 3)):
            step()
        return step

    return peak_of_steps(steps, bench.device)


def _rounds(
    options: StepOptions,
    bench: Workbench,
    entries: Sequence[Candidate],
    counted: dict[str, PassCount],
    alone: Callable[[], AbstractContextManager[None]],
) -> tuple[dict[str, Trial], dict[str, list[float]]]:
    """Returns the candidates after their first steps, and the seconds of each round, in turn."""
    trials = {entry.name: run_trial(entry, options, bench, counted) for entry in entries}
    with alone():
        seconds = interleaved(
            {name: trial.work for name, trial in trials.items()},
            rounds=options.rounds,
            warmup=options.warmup,
            clock=options.clock,
            synchronize=bench.synchronize,
            repeats={name: steps_in_a_row(trial, options, bench) for name, trial in trials.items()},
        )
    return trials, seconds


def _row(cell: _Cell, plain: _Cell | None) -> Row:
    own, theirs = _total(cell), None if plain is None else _total(plain)
    return Row(
        name=cell.entry.name,
        origin=cell.entry.origin,
        method=cell.entry.method,
        way=cell.entry.way,
        seconds=Spread.of(cell.seconds),
        forwards=cell.passes.forwards,
        backwards=cell.passes.backwards,
        peak_bytes=None if cell.peak is None else cell.peak.whole,
        times_plain=Spread(1.0, 1.0, 1.0) if cell is plain else cell.times_plain,
        total_bytes=own,
        memory_times_plain=None if own is None or theirs is None else own / theirs,
        steady_bytes=None if cell.peak is None else cell.resident + cell.peak.steady,
        reserved_bytes=None if cell.peak is None else cell.peak.reserved,
        in_a_row=cell.in_a_row,
        rounds=tuple(cell.seconds),
    )


def _total(cell: _Cell) -> int | None:
    return None if cell.peak is None else cell.resident + cell.peak.whole


def _release() -> None:
    release(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
