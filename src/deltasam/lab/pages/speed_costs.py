"""What a user decides by: the cost of every way to take a step, in plain steps, and the answers above it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deltasam.lab.pages.speed import DELTA, OURS, marked, ratio, shape
from deltasam.lab.pages.speed_targets import (
    CAPTURED_INSTANCE,
    LONG,
    LONG_SHAPES,
    MEMORY,
    RATIOS,
    SHAPES,
    STEPS,
    Place,
    Ratio,
    records_of,
)
from deltasam.lab.pages.statistics import table

WAYS = {"eager": "", "captured": " captured", "compiled": " compiled", "compiled + captured": " compiled+captured"}
METHODS = {"plain training": "ERM", "SAM": "SAM", "delta-SAM, probes in bf16": DELTA, "exact per-instance": OURS}
SIZES = ("16 x 64", "32 x 128")


def costs(results: Path) -> str:
    """Methods by ways: the time of a step in eager steps of plain training; BERT-base in bf16, two sizes."""
    records = records_of(results)
    rows = []
    for method, step in METHODS.items():
        cells = [method]
        for size in SIZES:
            here = [record for record in records if shape(record) == ("bert-base", size, "bf16")]
            for suffix in WAYS.values():
                found = (ratio(record, step + suffix, "ERM") for record in here)
                known = next((each for each in found if each is not None), None)
                cells.append("1" if step + suffix == "ERM" else marked(known and (known[0], None), None))
        rows.append(cells)
    return table(["", *(f"{size}: {way}" for size in SIZES for way in WAYS)], rows)


def spans(results: Path, figure: Ratio, places: Sequence[Place] = tuple(SHAPES), parts: Sequence[str] = STEPS) -> str:
    """The smallest and the largest ratio over some shapes, such as ``0.95 to 1.08``; empty if none was measured."""
    records = records_of(results, parts)
    values = sorted(found[0] for place in places if (found := figure.at(records, place)) is not None)
    ends = list(dict.fromkeys(f"{value:.2f}" for value in values[:1] + values[-1:]))
    return " to ".join(ends)


def answers(results: Path) -> str:
    """A sentence for each question that a user asks first, with the ratios over all measured shapes."""
    by_name = {figure.name: figure for figure in (*RATIOS, *MEMORY)}
    small, large = ([place for place in SHAPES if place[1] == size] for size in SIZES)

    def over(name: str, places: Sequence[Place] = tuple(SHAPES)) -> str:
        return spans(results, by_name[name], places)

    def at_length(tokens: int) -> str:
        places = [place for place in LONG_SHAPES if place[1].endswith(f" {tokens}")]
        return spans(results, LONG[0], places, ("long", "growth"))

    sentences = {
        "SAM costs two plain steps": {
            "{} times two plain steps captured": over("captured SAM / (2 x captured ERM)"),
            "{} plain steps compiled": over("compiled SAM / compiled ERM"),
        },
        "delta-SAM, captured, in steps of captured SAM": {
            "{} with probes in the precision of the other passes": over("captured delta-SAM / captured SAM"),
            "{} by default, with probes in float32": over("the same with probes in float32, the default"),
            "{} with `probe_every=4`": over("the same with `probe_every=4`"),
        },
        "Exact per-instance perturbation, in steps of SAM that are run in the same way": {
            "{} captured": over(CAPTURED_INSTANCE),
            "{} eager": over("eager exact per-instance / eager SAM"),
            "{} compiled and captured": over(RATIOS[-1].name),
            "{} captured at 512 tokens": at_length(512),
            "{} captured at 1,024 tokens": at_length(1024),
        },
        "Capturing saves the most on small batches": {
            "at 16 x 64 captured delta-SAM takes {} of the time of an *eager plain* step": over(
                "captured delta-SAM / *eager* ERM", small
            ),
        },
        "Compiling saves more": {
            "captured and compiled SAM takes {} of the time of captured SAM": over(
                "captured + compiled SAM / captured SAM"
            ),
        },
        "Memory of captured per-instance perturbation at 32 x 128, relative to SAM's": {
            "{} in total": over("per-instance, captured, total", large),
            "{} without weights and optimizer": over("per-instance, captured, beyond weights and optimizer", large),
        },
    }
    lines = []
    for lead, clauses in sentences.items():
        known = [text.format(value) for text, value in clauses.items() if value]
        lines.append(f"- **{lead}**: {'; '.join(known) or 'not measured yet'}.")
    return "\n".join(lines)
