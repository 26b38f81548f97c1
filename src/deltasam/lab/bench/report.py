"""The results of a step benchmark: as records, as a sentence and as a table in the terminal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from deltasam.lab.bench._clock import Spread
from deltasam.lab.bench._output import print_table, spread_text
from deltasam.lab.bench.options import StepOptions, Way
from deltasam.step.names import pluralized

PLAIN_LORA = "plain LoRA"
HEADLINE = {"SAM": "SAM", "DeltaSAM": "delta-SAM", "PerInstanceSAM": "per-instance"}
"""The methods of the first sentence, and their names in it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one candidate. Ratios are computed within each round. Values that were not measured are None.

    Attributes:
        name: The method, or the package and the method.
        origin: This package, or a third-party one.
        seconds: Time of a step.
        times_erm: Time relative to plain training.
        times_sam: Time relative to our SAM.
        times_ours: Time relative to this package, for ``isolate``.
        forwards: Forward passes of a step in units of the batch, counted by hooks.
        backwards: Backward passes of a step, counted in the same way.
        extra_copies: Peak memory in excess of plain training, in copies of the parameters.
        peak_bytes: Peak memory in excess of the weights, without an optimizer (with ``lora``: with it). Includes all
            memory of CUDA graphs.
        memory_times_sam: ``peak_bytes`` relative to our SAM, run in the same way.
        times_plain: Time relative to plain LoRA, run in the same way; only with ``lora``, as the next four.
        total_bytes: Peak memory of the whole step: weights, adapters, optimizer, activations, CUDA graphs.
        memory_times_plain: ``total_bytes`` relative to plain LoRA, run in the same way.
        steady_bytes: ``total_bytes`` without what only the first steps need, such as checks on first use.
        reserved_bytes: Peak of what CUDA's allocator held, with fragmentation.
        in_a_row: Consecutive steps in each round.
        method: The method.
        way: How it was run.
        rounds: Seconds per step in every round. The same index means the same round in all rows.
    """

    name: str
    origin: Literal["deltasam", "third_party"]
    seconds: Spread
    times_erm: Spread | None = None
    times_sam: Spread | None = None
    times_ours: Spread | None = None
    forwards: float | None = None
    backwards: float | None = None
    extra_copies: float | None = None
    peak_bytes: int | None = None
    memory_times_sam: float | None = None
    times_plain: Spread | None = None
    total_bytes: int | None = None
    memory_times_plain: float | None = None
    steady_bytes: int | None = None
    reserved_bytes: int | None = None
    in_a_row: int = 1
    method: str = ""
    way: Way = "eager"
    rounds: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of a benchmark.

    Attributes:
        options: What was measured.
        rows: One row per candidate.
        failures: The reason for each candidate that could not run.
        machine: Device and versions.
        remarks: What a candidate warned of, such as a fallback to something slower; only with ``lora``.
        engine: Number of linear layers per form in the per-instance engine, see ``_facts``.
    """

    options: StepOptions
    rows: tuple[Row, ...]
    failures: dict[str, str]
    machine: dict[str, str]
    engine: dict[str, int] | None = None
    remarks: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """One line about what was measured."""
        options, machine = self.options, self.machine
        what = "norm + perturb + restore" if options.isolate else "one training step, AdamW included"
        size = f"{int(machine['parameters']) / 1e6:.1f}M parameters"
        shape = "" if options.isolate else f", {options.batch} x {options.length}, dropout {options.dropout:g}"
        if options.lora:
            adapters = f"LoRA {options.rank} ({machine['adapters']})"
            size = f"{size}, {adapters}{', checkpointing' if options.checkpointing else ''}"
        threads = pluralized(int(machine["threads"]), "thread")
        where = f"{machine['device']}, {threads}, torch {machine['torch']}"
        return f"{what}: {options.shape}, {size}{shape}, {options.precision}, {where}, {options.clock} clock"


def show(report: Report) -> None:
    """Prints what a user decides by, then the table."""
    for line in headlines(report):
        print(line)
    if report.options.lora:
        _show_lora(report)
        return
    rows = report.rows
    columns = {
        "method": [row.name for row in rows],
        "ms": [spread_text(row.seconds, ".1f", 1e3) for row in rows],
        "x ERM": [spread_text(row.times_erm, ".2f") for row in rows],
        "x SAM": [spread_text(row.times_sam, ".2f") for row in rows],
        "x ours": [spread_text(row.times_ours, ".2f") for row in rows],
        "passes": ["" if row.forwards is None else f"{row.forwards:.3g}/{row.backwards:.3g}" for row in rows],
        "MiB": ["" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f}" for row in rows],
        "memory": ["" if row.extra_copies is None else f"{row.extra_copies:+.2f}" for row in rows],
    }
    note = "median ± half the interquartile range"
    if not report.options.isolate:
        note += "; plain step: eager ERM; passes: forward/backward, counted by hooks"
    if any(columns["MiB"]):
        note += "; MiB: peak memory without weights and optimizer; memory: excess over ERM in copies of the parameters"
    notes = [note, *(f"{name} could not run: {reason}" for name, reason in report.failures.items())]
    print_table(report.title, columns, notes)


def _show_lora(report: Report) -> None:
    """Prints the table: time and memory relative to plain LoRA, run in the same way."""
    rows = report.rows
    columns = {
        "method": [row.name for row in rows],
        "ms": [spread_text(row.seconds, ".1f", 1e3) for row in rows],
        "x plain": [spread_text(row.times_plain, ".2f") for row in rows],
        "passes": ["" if row.forwards is None else f"{row.forwards:.3g}/{row.backwards:.3g}" for row in rows],
        "peak GiB": [_gib(row.total_bytes) for row in rows],
        "x plain's": ["" if row.memory_times_plain is None else f"{row.memory_times_plain:.2f}" for row in rows],
        "without weights": [_gib(row.peak_bytes) for row in rows],
        "later steps": [_gib(row.steady_bytes) for row in rows],
        "reserved": [_gib(row.reserved_bytes) for row in rows],
    }
    time = "median ± half the interquartile range; x plain: relative to plain LoRA, run in the same way; passes: "
    time += "forward/backward, without the recomputation of checkpointing"
    memory = "peak GiB: from the first step on, with weights, optimizer and CUDA graphs; later steps: without checks "
    memory += "on first use; reserved: by CUDA's allocator"
    notes = [
        time,
        *([memory] if any(columns["peak GiB"]) else []),
        *(f"{name} could not run: {reason}" for name, reason in report.failures.items()),
        *(f"{name} warned: {text}" for name, text in report.remarks.items() if name not in report.failures),
    ]
    print_table(report.title, columns, notes)


def headlines(report: Report) -> list[str]:
    """Returns sentences with the costs in plain steps, for what was measured; none with ``isolate``."""
    return (_in_lora_steps if report.options.lora else _in_plain_steps)(report.rows)


def _in_plain_steps(rows: tuple[Row, ...]) -> list[str]:
    """Returns one sentence in units of an eager step of plain training."""
    parts: list[str] = []
    for method, name in HEADLINE.items():
        costs = [(row.way, row.times_erm.median) for row in rows if row.method == method and row.times_erm]
        cells = [f"{'' if way == 'eager' else way.replace('+', ' and ') + ' '}{cost:.2f}" for way, cost in costs]
        if cells and not parts:
            parts.append("; ".join([f"A step of {name} costs {cells[0]} plain steps here", *cells[1:]]))
        elif cells:
            parts.append(f"{name} {', '.join(cells)}")
    return ["; ".join(parts) + "."] if parts else []


def _in_lora_steps(rows: tuple[Row, ...]) -> list[str]:
    """Returns one sentence per way: SAM, and per-instance SAM on the frozen base, or else the last method."""
    lines = []
    for way in dict.fromkeys(row.way for row in rows):
        measured = [row for row in rows if row.way == way and row.method != PLAIN_LORA]
        sam = [row for row in measured if row.method.partition("(")[0] == "SAM"]
        base = [row for row in measured if row.method.startswith("PerInstanceSAM") and "params=base" in row.method]
        chosen = [*sam[:1], *base[:1]] or measured[-1:]
        names = ["per-instance SAM on the frozen base" if row in base else row.method for row in chosen]
        parts: list[str] = []
        for name, row in zip(names, chosen, strict=True):
            if row.times_plain is not None:
                memory = row.memory_times_plain
                start = (
                    f"{name} {row.times_plain.median:.2f}"
                    if parts
                    else f"A step of {name} costs {row.times_plain.median:.2f} plain LoRA steps here"
                )
                share = "" if memory is None else f" and {memory:.2f} of their memory"
                parts.append(start + share)
        if parts:
            lines.append(f"{'; '.join(parts)} ({way}).")
    return lines


def _gib(size: int | None) -> str:
    return "" if not size else f"{size / 2**30:.3g}"


def record(report: Report, **more: str) -> dict[str, Any]:
    """Returns the report as plain data, without the names of output files; ``more`` is added at the top."""
    plain = asdict(report)
    del plain["options"]["json"], plain["options"]["plot"]
    return {**more, "headlines": headlines(report), **plain}
