"""The sections of the page on speed that are not the table of figures, and the ratios all of them are made of."""

from __future__ import annotations

import runpy
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltasam.step.names import counted

table = runpy.run_path(str(Path(__file__).with_name("page_tables.py")))["table"]
two_panels = runpy.run_path(str(Path(__file__).with_name("speed_plots.py")))["two_panels"]

Result = dict[str, Any]
GROWN = ("ERM", "SAM", "DeltaSAM-ambient", "PerInstanceSAM")
AXES = {  # name of the plot: (heading, what is on the axis, the settings that its measurements share)
    "instances": ("Over the number of instances", "instances N", {"model": "bert-base", "length": 64}),
    "tokens": ("Over the number of tokens", "tokens T", {"model": "bert-base", "batch": 16}),
    "parameters": ("Over the size of the model", "million parameters", {"batch": 16, "length": 64}),
}
SECTIONS = {
    "train": "End to end",
    "growth": "How cost grows",
    "loop": "Against the loop",
    "cpu": "On a CPU: per instance",
    "adamw": "On a CPU: which AdamW",
}
CPU_TARGETS = {("bert-4x256", 16, 64): 1.25, ("bert-2x768", 8, 128): 1.05, ("bert-2x768", 16, 64): 1.05}
OLDER = """## Older measurements

Taken around commit 2f5fb86 with few rounds, before the core learnt of several processes and before the last work on
the eager per-instance engine; the eager rows with AdamW's foreach implementation."""
ONE_STEP = """### One step at a time

The host waits for the device after every step, so its own work is in these times; an earlier form of the command.
Passes and memory of the captured rows, which it got wrong, are left out."""


def row_of(result: Result, name: str) -> Result | None:
    return next((row for row in result["rows"] if row["name"] == name), None)


def ratio(result: Result, above: str, below: str) -> tuple[float, float] | None:
    """Median of the ratios within the rounds, and half the distance of the quartiles; None if one was not measured."""
    a, b = row_of(result, above), row_of(result, below)
    if a is None or b is None:
        return None
    values = [x / y for x, y in zip(a["rounds"], b["rounds"], strict=True)]
    if len(values) == 1:
        return values[0], 0.0
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (high - low) / 2


def memory_ratio(result: Result, way: str, *, total: bool, method: str = "PerInstanceSAM") -> float | None:
    """Peak memory of a per-instance method against SAM run in the same way.

    Args:
        result: The measurement.
        method: Its name in the measurement.
        way: Eager or captured.
        total: With the weights and the two moments of AdamW, three copies of the parameters.
    """
    suffix = "" if way == "eager" else f" {way}"
    ours, sam = (row_of(result, f"{name}{suffix}") for name in (method, "SAM"))
    if ours is None or sam is None or ours["peak_bytes"] is None or sam["peak_bytes"] is None:
        return None
    more = 3 * int(result["machine"]["parameter_bytes"]) if total else 0
    return (ours["peak_bytes"] + more) / (sam["peak_bytes"] + more)


def title(result: Result) -> str:
    options, machine = result["options"], result["machine"]
    shape = f"{options['model']} ({int(machine['parameters']) / 1e6:.0f}M), {options['batch']} x {options['length']}"
    compiled = ", compiled" if any("compiled" in row["name"] for row in result["rows"]) else ""
    return f"{shape}, {options['precision']}{compiled}, {machine['device']}, torch {machine['torch']}"


def rows(result: Result) -> str:
    """The rows of a measurement as a table; memory beyond the weights, without an optimizer."""
    memory = any(row.get("memory_times_sam") for row in result["rows"])
    lines = [f"| step | ms | ± | x eager ERM | x eager SAM | passes |{' GiB |' if memory else ''}"]
    lines.append("|---|---|---|---|---|---|" + ("---|" if memory else ""))
    for row in result["rows"]:
        passes = "" if row["forwards"] is None else f"{row['forwards']:g}/{row['backwards']:g}"
        seconds = row["seconds"]
        around = (seconds["high"] - seconds["low"]) / 2 * 1e3
        ratios = " | ".join(f"{row[key]['median']:.2f}" for key in ("times_erm", "times_sam"))
        line = f"| {row['name']} | {seconds['median'] * 1e3:.1f} | {around:.1f} | {ratios} | {passes} |"
        peak = row.get("peak_bytes")
        lines.append(line + ("" if not memory else f" {'' if peak is None else f'{peak / 2**30:.2f}'} |"))
    return "\n".join(lines)


def milliseconds(result: Result, name: str) -> str:
    row = row_of(result, name)
    return "-" if row is None else f"{row['seconds']['median'] * 1e3:.1f}"


def times(result: Result, above: str, below: str) -> str:
    found = ratio(result, above, below)
    return "-" if found is None else f"{found[0]:.2f}"


def loop(results: Sequence[Result]) -> str:
    """What the low-rank engine saves: the same gradient, one instance after the other."""
    text = "The exact per-instance gradient taken one instance after the other, beside the low-rank engine."
    head = ["", "loop, ms", "engine, ms", "engine captured, ms", "SAM, ms"]
    lines = []
    slow, ours = "PerInstanceSAM-loop", "PerInstanceSAM"
    for result in results:
        options = result["options"]
        shape = f"{options['model']}, {options['batch']} x {options['length']}, {options['precision']}"
        numbers = [milliseconds(result, name) for name in (slow, ours, f"{ours} captured", "SAM")]
        ratios = [times(result, slow, name) for name in (ours, f"{ours} captured", "SAM")]
        lines.append([shape, *numbers, *ratios])
    return f"{text}\n\n{table([*head, 'loop / engine', 'loop / captured', 'loop / SAM'], lines)}"


def on_axis(results: Sequence[Result], axis: str) -> list[tuple[float, Result]]:
    """The measurements of an axis, with their places on it."""
    shared = AXES[axis][2]
    chosen = [r for r in results if {name: r["options"][name] for name in shared} == shared]
    place = {
        "instances": lambda r: r["options"]["batch"],
        "tokens": lambda r: r["options"]["length"],
        "parameters": lambda r: int(r["machine"]["parameters"]) / 1e6,
    }[axis]
    return sorted(((place(result), result) for result in chosen), key=lambda pair: pair[0])


def growth(results: Sequence[Result]) -> str:
    """Three tables with their plots."""
    precision = results[0]["options"]["precision"]
    text = (
        f"In {precision}. Times are those of captured steps. A layer's gradients of one instance cost T (in + out) "
        "numbers in low rank and in x out written out; the engine takes the cheaper form layer by layer. For "
        "BERT-base it writes out the square layers (768 x 768) from T = 384 on and those of the feed-forward part "
        "(768 x 3072) from T = 615 on; the last column counts the linear layers in each form."
    )
    head = ("SAM, ms", "delta-SAM / SAM", "per-instance / SAM", "eager: delta-SAM / SAM", "eager: per-instance / SAM")
    head = (*head, "memory: per-instance / SAM", "low rank + written out")
    blocks = [text]
    for axis, (heading, name, _) in AXES.items():
        found = on_axis(results, axis)
        if len(found) < 2:
            blocks.append(f"{heading}: not measured yet.")
            continue
        lines = []
        for place, result in found:
            memory = memory_ratio(result, "captured", total=True)
            engine = result.get("engine")
            cells = [
                f"{place:.0f}",
                milliseconds(result, "SAM captured"),
                *(times(result, f"{method}{way}", f"SAM{way}") for way in (" captured", "") for method in GROWN[2:]),
                "-" if memory is None else f"{memory:.2f}",
                "-" if engine is None else f"{engine['low-rank']} + {engine['materialised']}",
            ]
            lines.append(cells)
        plot = f"![{heading}](_static/speed/{axis}.svg)"
        blocks.append(f"### {heading}\n\n{plot}\n\n{table([name, *head], lines)}")
    return "\n\n".join(blocks)


def growth_plots(results: Sequence[Result]) -> dict[str, str]:
    """One plot per axis: time of a captured step, and the ratio to SAM run in the same way."""
    charts = {}
    for axis, (_, name, _) in AXES.items():
        found = on_axis(results, axis)
        if len(found) < 2:
            continue
        steps: dict[str, list[tuple[float, float]]] = {}
        against: dict[str, list[tuple[float, float]]] = {}
        for place, result in found:
            for method in GROWN:
                row = row_of(result, f"{method} captured")
                if row is not None:
                    steps.setdefault(method, []).append((place, row["seconds"]["median"] * 1e3))
            for method in GROWN[2:]:
                for way, label in ((" captured", method), ("", f"{method} eager")):
                    value = ratio(result, f"{method}{way}", f"SAM{way}")
                    if value is not None:
                        against.setdefault(label, []).append((place, value[0]))
        titles = ("captured step, ms", "time / SAM's (dashed: eager)")
        charts[f"{axis}.svg"] = two_panels(steps, against, x=name, titles=titles)
    return charts


def train(results: Sequence[Result]) -> str:
    """Whole trainings; the target is half of eager SAM's time for captured delta-SAM."""
    blocks = []
    for result in results:
        options, machine = result["options"], result["machine"]
        length = f"{options['steps']} updates" if options["steps"] is not None else f"{options['epochs']:g} epochs"
        what = f"{options['task']}, {options['model']}, {length}, {options['precision']}, batch {options['batch']}"
        text = (
            f"`deltasam bench train`: {what}; {machine['device']}, torch {machine['torch']}, commit "
            f"{machine['commit']}. Wall time of the training in the path of `deltasam train`, loading included, "
            "evaluation not. Target: captured delta-SAM in at most 0.50 of eager SAM's time."
        )
        head = ["training", "seconds", "x eager SAM", "x eager ERM", "ms per update", "passes"]
        lines = []
        for row in result["rows"]:
            run = row["runs"][0]
            target = row["way"] == "captured" and row["method"].lower().replace("-", "").startswith("deltasam")
            sam, erm = (None if row[key] is None else row[key]["median"] for key in ("times_sam", "times_erm"))
            mark = "" if not target or sam is None else " ✓" if round(sam, 2) <= 0.5 else " ✗"
            pace = [one["seconds_per_update"] for one in row["runs"] if one["seconds_per_update"] is not None]
            cells = [
                row["name"],
                f"{row['seconds']['median']:.1f}",
                "-" if sam is None else f"{sam:.2f}{mark}",
                "-" if erm is None else f"{erm:.2f}",
                f"{statistics.median(pace) * 1e3:.1f}" if pace else "-",
                f"{run['forwards']}/{run['backwards']}",
            ]
            lines.append(cells)
        blocks.append(f"{text}\n\n{table(head, lines)}")
    return "\n\n".join(blocks)


def cpu(results: Sequence[Result]) -> str:
    """The exact per-instance gradient on a CPU, where arithmetic counts and not the launching of kernels."""
    head = ["", "SAM, ms", "engine, ms", "loop, ms", "engine / SAM", "target", "loop / engine"]
    lines = []
    for result in results:
        options = result["options"]
        target = CPU_TARGETS.get((options["model"], options["batch"], options["length"]))
        against = ratio(result, "PerInstanceSAM", "SAM")
        mark = "" if target is None or against is None else " ✓" if round(against[0], 2) <= target else " ✗"
        cells = [
            f"{title(result)}, {threads(result)}",
            *(milliseconds(result, name) for name in ("SAM", "PerInstanceSAM", "PerInstanceSAM-loop")),
            "-" if against is None else f"{against[0]:.2f} ±{against[1]:.2f}{mark}",
            "" if target is None else f"<= {target}",
            times(result, "PerInstanceSAM-loop", "PerInstanceSAM"),
        ]
        lines.append(cells)
    return f"Wall time; the loop takes one instance after the other.\n\n{table(head, lines)}"


def threads(result: Result) -> str:
    """How many, in words."""
    return counted(int(result["machine"]["threads"]), "thread")


def adamw(results: Sequence[Result]) -> str:
    """The implementations of AdamW on a CPU, and which one to take."""
    blocks = []
    for result in results:
        options = result["options"]
        head = ["AdamW", "ERM, ms", "SAM, ms", "ERM / fused", "SAM / fused"]
        lines = []
        for kind in options["adamw"]:
            names = [step if kind == options["adamw"][0] else f"{step}, {kind} AdamW" for step in ("ERM", "SAM")]
            numbers = [milliseconds(result, name) for name in names]
            ratios = [ratio(result, name, base) for name, base in zip(names, ("ERM", "SAM"), strict=True)]
            shown = ["-" if found is None else f"{found[0]:.2f} ±{found[1]:.2f}" for found in ratios]
            lines.append([kind, *numbers, *shown])
        text = f"{title(result)}, {threads(result)}, {options['rounds']} rounds."
        blocks.append(f"{text}\n\n{table(head, lines)}")
    blocks.append(
        "Processor time on a shared machine; the smaller the batch, the more the optimizer weighs. torch takes the "
        "for-loop on a CPU unless told otherwise: pass `fused=True` to `torch.optim.AdamW` there, too (Hugging Face's "
        "Trainer does so by itself)."
    )
    return "\n\n".join(blocks)
