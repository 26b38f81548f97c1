"""The section of docs/results.md on the instances that delta-SAM's weights lie on: their losses and their labels."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

weights = runpy.run_path(str(Path(__file__).with_name("results_weights.py")))
table, with_interval = weights["table"], weights["with_interval"]

NAMES = {**weights["NAMES"], "RandomWeights": "Eq. 5, shuffled"}
ABOUT = """CoLA, where delta-SAM's weights do matter (below): plain training of the small encoder, {rows} rows of the
training set in batches of {batch} without dropout, rho = {rho:g}, {device}, float32, commit {commit}. *With the loss*:
rank correlation of g with the loss of the instance. *Rarer, other class*: mean weight of the sentences that are not
acceptable, and of the others, where 1 is the mean of the batch. Means over the batches with 95% intervals.

    python benchmarks/weights_by_label.py"""


def labels_section(results: Path) -> str:
    """A row for every weighting and model; nothing where nothing was measured."""
    files = sorted((results / "weights-by-label").glob("cola-*.json"))
    found = sorted((json.loads(file.read_text(encoding="utf-8")) for file in files), key=lambda each: each["updates"])
    if not found:
        return ""
    rows = [
        [
            str(each["updates"]), NAMES[name], with_interval(lines["with_loss"], 2),
            with_interval(lines["by_label"]["0"], 2), with_interval(lines["by_label"]["1"], 2),
        ]
        for each in found
        for name, lines in each["weightings"].items()
    ]  # fmt: skip
    first = found[0]
    facts: dict[str, Any] = {key: first[key] for key in ("rows", "batch", "rho", "device")}
    facts["commit"] = str(first["commit"])[:7]
    facts["device"] = str(first["device"]).replace(", 1 threads", ", 1 thread")  # as it was written then
    head = ["updates", "weights", "with the loss", "rarer class", "other class"]
    return "\n\n".join(["### On which instances do they lie?", ABOUT.format(**facts), table(head, rows)])
