"""Further tables of the speed page: other packages, accumulation, whole trainings, a CPU, and the commands."""

from __future__ import annotations

import statistics
from itertools import product
from pathlib import Path

from deltasam.lab.pages.measurements import loaded
from deltasam.lab.pages.speed import (
    NOTHING,
    OURS,
    SLOW,
    Columns,
    Record,
    by_measurement,
    marked,
    measured,
    ms,
    ratio,
    shape,
    times,
)
from deltasam.lab.pages.speed_targets import STEPS
from deltasam.lab.pages.statistics import table

PARTS = (*STEPS, "long", "peers", "relatives", "accumulation", "growth", "loop", "train", "cpu", "mlp", "adamw")
PEERS = ("pytorch_optimizer.SAM", "SAM of davda54's kind")
RELATIVES = ("LookSAM", "ESAM", "FisherSAM")
PARTS_OF_A_STEP = 4  # micro-batches in the part accumulation
LOOP: Columns = {
    "": lambda r: ", ".join(shape(r)),
    "loop, ms": ms(SLOW),
    "engine, ms": ms(OURS),
    "engine captured, ms": ms(f"{OURS} captured"),
    "SAM, ms": ms("SAM"),
    "loop / engine": times(SLOW, OURS),
    "loop / captured": times(SLOW, f"{OURS} captured"),
    "loop / SAM": times(SLOW, "SAM"),
}
CPU_TARGETS = {"bert-4x256": 1.25, "bert-2x768": 1.05}
CPU: Columns = {
    "": lambda r: ", ".join(shape(r)),
    "SAM, ms": ms("SAM"),
    "engine, ms": ms(OURS),
    "loop, ms": ms(SLOW),
    "engine / SAM": lambda r: marked(ratio(r, OURS, "SAM"), CPU_TARGETS[r["options"]["model"]]),
    "at most": lambda r: f"{CPU_TARGETS[r['options']['model']]}",
    "loop / engine": times(SLOW, OURS),
}


def steps(results: Path) -> str:
    """Every step of every measurement behind the ratios."""
    rows = []
    for part, record in [(each, found) for each in (*STEPS, "long") for found in measured(results, each)]:
        for row in record["rows"]:
            seconds, peak = row["seconds"], row.get("peak_bytes")
            rows.append([
                part, *shape(record), row["name"], f"{seconds['median'] * 1e3:.1f}",
                f"{(seconds['high'] - seconds['low']) / 2 * 1e3:.1f}", f"{row['times_erm']['median']:.2f}",
                f"{row['times_sam']['median']:.2f}", f"{row['forwards']:g}/{row['backwards']:g}",
                "" if peak is None else f"{peak / 2**30:.2f}",
            ])  # fmt: skip
    head = ["part", "model", "size", "precision", "step", "ms", "±", "x eager ERM", "x eager SAM", "passes", "GiB"]
    return table(head, rows)


def peers(results: Path) -> str:
    """SAM of other packages relative to ours, on a GPU."""
    rows = []
    for record, peer in product(measured(results, "peers"), PEERS):
        cells = [ms(peer), ms("SAM"), ms("SAM captured"), times(peer, "SAM", 1.0, at_least=True)]
        cells.append(times(peer, "SAM captured", 2.5, at_least=True))
        rows.append([peer, ", ".join(shape(record)), *(cell(record) for cell in cells)])
    head = ["package", "", "theirs, ms", "ours, ms", "ours captured, ms", "theirs / ours (at least 1)",
            "theirs / ours captured (at least 2.5)"]  # fmt: skip
    return table(head, rows) if rows else NOTHING


def mlp(results: Path) -> str:
    """SAM on a small network on a CPU: in plain steps, and relative to other packages."""
    rows = []
    for record in measured(results, "mlp"):
        for name in ("SAM", *PEERS):
            own = marked(ratio(record, "SAM", name), 1.0) if name != "SAM" else ""
            rows.append(["ours" if name == "SAM" else name, ms(name)(record), times(name, "ERM")(record), own])
    return table(["SAM", "ms", "x ERM", "ours / theirs (at most 1)"], rows) if rows else NOTHING


def relatives(results: Path) -> str:
    """Methods whose steps differ from each other, eager and captured."""
    rows = []
    for record, name in product(measured(results, "relatives"), RELATIVES):
        captured = f"{name} captured"
        cells = [ms(name), times(name, "SAM"), ms(captured), times(captured, "SAM captured"), times(captured, name)]
        rows.append([f"`{name}`", *(cell(record) for cell in cells)])
    head = ["method", "eager, ms", "/ SAM", "captured, ms", "/ captured SAM", "captured / eager"]
    return table(head, rows) if rows else NOTHING


def accumulation(results: Path) -> str:
    """A step over several micro-batches, relative to as many steps over one."""
    rows = []
    for record, name in product(measured(results, "accumulation"), ("ERM", "SAM", OURS)):
        cells = [name]
        for way in ("", " captured"):
            several = f"{name}, {PARTS_OF_A_STEP} micro-batches{way}"
            found = ratio(record, several, f"{name}{way}")
            price = None if found is None else (found[0] / PARTS_OF_A_STEP, None)
            cells += [ms(several)(record), marked(price, None)]
        rows.append(cells)
    many = f"{PARTS_OF_A_STEP} steps"
    return table(["step", "eager, ms", f"/ {many}", "captured, ms", f"/ {many}"], rows) if rows else NOTHING


def trainings(results: Path) -> str:
    """Whole trainings; captured delta-SAM should take at most half of the time of eager SAM."""
    rows = []
    for task, row in [(r["options"]["task"], row) for r in measured(results, "train") for row in r["rows"]]:
        target = 0.5 if row["name"] == "delta-sam captured" else None
        pace = statistics.median(run["seconds_per_update"] for run in row["runs"])
        before, eager_sam, eager_erm = row["runs"][0].get("prepare_seconds"), row["times_sam"], row["times_erm"]
        rows.append([
            task.upper(), row["name"], f"{row['seconds']['median']:.1f}",
            "-" if before is None else f"{before:.1f}",
            "-" if eager_sam is None else marked((eager_sam["median"], None), target),
            "-" if eager_erm is None else f"{eager_erm['median']:.2f}", f"{pace * 1e3:.1f}",
            f"{row['runs'][0]['forwards']}/{row['runs'][0]['backwards']}",
        ])  # fmt: skip
    head = ["task", "training", "seconds", "before", "x eager SAM", "x eager ERM", "ms per update", "passes"]
    return table(head, rows) if rows else NOTHING


def training_settings(results: Path) -> str:
    """What was trained, and where."""
    lines = []
    for record in measured(results, "train"):
        options, machine = record["options"], record["machine"]
        updates = record["rows"][0]["runs"][0]["updates"]
        lines.append(
            f"- {options['task'].upper()}: {options['model']}, {updates} updates, {options['precision']}, batch "
            f"{options['batch']}; {machine['device']}, torch {machine['torch']}, commit {machine['commit']}"
        )
    return "\n".join(lines) or NOTHING


def overhead(results: Path) -> str:
    """Milliseconds of this package's own Python in an eager step, written by ``benchmarks/overhead.py``."""
    rows = [
        [name, f"{float(value):.3f}"]
        for record in loaded(results / "speed" / "overhead")
        for name, value in record["milliseconds"].items()
    ]
    return table(["part of a step", "ms"], rows) if rows else NOTHING


def operations(results: Path) -> str:
    """How many operations an eager step launches, written by ``benchmarks/operations.py``, and the ratio of times."""
    timed = {shape(record): record for record in measured(results, "eager")}
    rows = []
    for record in loaded(results / "speed" / "operations"):
        asked, counts = record["options"], {row["name"]: row["operations"] for row in record["rows"]}
        where = (asked["model"], asked["size"].replace("x", " x "), asked["precision"])
        measured_ratio = times(OURS, "SAM")(timed[where]) if where in timed else "-"
        cells = [str(counts[name]) for name in ("ERM", "SAM", OURS)]
        rows.append([", ".join(where), *cells, f"{counts[OURS] / counts['SAM']:.2f}", measured_ratio])
    head = ["", "ERM", "SAM", OURS, f"{OURS} / SAM", "their times"]
    return table(head, rows) if rows else NOTHING


def compile_time(results: Path) -> str:
    """Seconds to compile one shape, and the time of its step, written by ``benchmarks/compile_time.py``."""
    rows = [
        [
            record["method"], "yes" if record["tuned"] else "no", str(record["kernels"]),
            f"{record['compile_seconds']:.0f}", f"{record['step_seconds'] * 1e3:.2f}",
        ]
        for record in loaded(results / "speed" / "compile-time")
    ]  # fmt: skip
    head = ["method", "kernels tuned", "kernels", "compiling, s", "captured step, ms"]
    return table(head, sorted(rows)) if rows else NOTHING


def adamw(results: Path) -> str:
    """The implementations of AdamW on a CPU."""
    rows = []
    for record, kind in product(measured(results, "adamw"), ("fused", "foreach", "for-loop")):
        names = [step + ("" if kind == "fused" else f", {kind} AdamW") for step in ("ERM", "SAM")]
        found = [ratio(record, name, name.partition(",")[0]) or (0.0, 0.0) for name in names]
        spread = [f"{value:.2f} ±{around:.2f}" for value, around in found]
        rows.append([shape(record)[1], kind, *(ms(name)(record) for name in names), *spread])
    return table(["size", "AdamW", "ERM, ms", "SAM, ms", "ERM / fused", "SAM / fused"], rows)


def loop(results: Path) -> str:
    """The low-rank engine against one instance after the other."""
    return by_measurement(measured(results, "loop"), LOOP)


def cpu(results: Path) -> str:
    """The same on a CPU."""
    return by_measurement(measured(results, "cpu"), CPU)


def failures(results: Path) -> str:
    """Steps that could not run, with the reason that was recorded."""
    rows = [
        [part, ", ".join(shape(record)), name, why.replace("|", "\\|")]
        for part in PARTS
        for record in measured(results, part)
        for name, why in record.get("failures", {}).items()
    ]
    return table(["part", "", "step", "reason"], rows) if rows else "None."


def provenance(results: Path) -> str:
    """The machine, the commits and the commands of every part that was measured."""
    rows = []
    for part in PARTS:
        records = measured(results, part)
        machines = {f"{r['machine']['device']}, torch {r['machine']['torch']}" for r in records}
        commits = {r["machine"]["commit"] for r in records}
        commands = {f"`PYTHONPATH=src {_command(r)}`" for r in records}
        if records:
            rows.append([part, "; ".join(sorted(machines)), ", ".join(sorted(commits)), "<br>".join(sorted(commands))])
    return table(["part", "machine", "commit", "command"], rows)


def _command(record: Record) -> str:
    return record.get("command") or f"python -m deltasam.lab.cli bench train {record['options']['task']}"
