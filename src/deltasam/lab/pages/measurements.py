"""The measurements of ``results/`` that are not runs: delta-SAM's weights, running times, coverage, other packages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from deltasam.lab.pages.runs import TASKS
from deltasam.lab.pages.statistics import batch_mean, cell_table, interval, table
from deltasam.lab.report import method_name, paper, read_runs

NAMES = {
    "FiniteDifference": "Eq. 5", "Directional": "derivatives along r", "OwnGradient": "own gradient",
    "RandomWeights": "weights of Eq. 5 shuffled", "LossWeights": "weights by the loss",
    "FiniteDifference(radius=0.5)": "Eq. 5, probes of norm 0.5",
    "FiniteDifference(radius=2.0)": "Eq. 5, probes of norm 2", "FiniteDifference(samples=8)": "Eq. 5, 8 directions",
    "another direction": "another random direction", "bf16": "bfloat16 (autocast)",
}  # fmt: skip
METHODS = {"erm": "ERM", "sam": "SAM", "delta-sam": "DeltaSAM", "per-instance-sam": "PerInstanceSAM"}
EQ5, SHUFFLED, OWN = (f"DeltaSAM {name}" for name in ("FiniteDifference", "RandomWeights", "OwnGradient"))
OTHERS = [f"DeltaSAM {name}" for name in (*(n for n in NAMES if n.startswith("FiniteDifference(")), "Directional",
                                          "LossWeights")]  # fmt: skip
COSINE_PAIRS = [
    (EQ5, "SAM"), (EQ5, SHUFFLED), (SHUFFLED, "SAM"), (OWN, "SAM"), (OWN, EQ5),
    *((name, second) for name in OTHERS for second in ("SAM", SHUFFLED)),
]  # fmt: skip


def named(row: str) -> str:
    """An estimator and a condition, or a method, as the page names them."""
    first, bar, second = row.partition(" | ")
    if first.startswith("DeltaSAM "):
        return f"δ-SAM, {NAMES[first.removeprefix('DeltaSAM ')]}"
    return NAMES.get(first, first) + bar + NAMES.get(second, second)


def loaded(folder: Path, pattern: str = "*.json") -> list[Any]:
    """The JSON files of a folder, in the order of their names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))]


def models(results: Path, folder: str) -> Iterator[tuple[int, list[Any]]]:
    """Updates and measured lines of each model, in the order of training; of either format of the files."""
    if folder == "weights":  # written by `deltasam analyze ... --json`: every line names its run
        steps = {run.path.name: run.steps for run in read_runs(results / folder).finished}
        found = [(steps[lines[0]["run"]], lines) for lines in loaded(results / folder)]
    else:
        found = [
            (record["updates"], [line for each in record["measurements"].values() for line in each["lines"]])
            for record in loaded(results / folder)
        ]
    yield from sorted(found, key=lambda model: model[0])


def weight_lines(results: Path, folders: dict[str, str], field: str) -> pd.DataFrame:
    """One quantity of the weights: (estimator, condition) or method by model, with the batch as the unit.

    Args:
        results: The folder of all results.
        folders: Folder -> heading of a model's column, with ``{}`` for its updates.
        field: ``spearman``, ``snr``, ``median`` or ``ideal`` of the weights; ``regulariser`` or ``update``, the
            cosines of the methods.
    """
    rows: list[tuple[str, str, int, float]] = []
    for folder, heading in folders.items():
        for updates, lines in models(results, folder):
            for line in lines:
                key = f"{line['weighting']} | {line['condition']}" if "condition" in line else line["method"]
                if field in line["by_batch"] and not _trivial(*key.split(" | "), field=field):
                    values = [np.nan if value is None else value for value in line["by_batch"][field]]
                    rows += [(key, heading.format(updates), unit, value) for unit, value in enumerate(values)]
    frame = pd.DataFrame(rows, columns=["row", "column", "unit", "value"])
    return frame.drop_duplicates(["row", "column", "unit"])  # SAM is in both measurements of the cosines


def _trivial(first: str, condition: str = "", *, field: str) -> bool:
    """Whether a row is 1 by definition or repeats another."""
    if field == "median":
        return not first.startswith("FiniteDifference") or condition == "another direction"
    if field == "ideal":
        return condition not in ("float64", "float32") or first == "OwnGradient"
    return condition == "float64" or first == "PerInstanceSAM"


def by_label(results: Path) -> str:
    """Rank correlation of the weights with the loss, and the mean weight of each class, on CoLA."""
    rows = []
    for record in sorted(loaded(results / "weights-by-label"), key=lambda record: record["updates"]):
        for name, lines in record["weightings"].items():
            columns = {"with the loss": lines["with_loss"], "rarer class": lines["by_label"]["0"],
                       "other class": lines["by_label"]["1"]}  # fmt: skip
            for column, values in columns.items():
                rows += [(f"{record['updates']} | {name}", column, n, value) for n, value in enumerate(values)]
    frame = pd.DataFrame(rows, columns=["row", "column", "unit", "value"])
    return cell_table(frame, batch_mean, "updates | weights", named)


def eta_floor(results: Path) -> str:
    """How often the denominator of Eq. 5 is at eta, and the cosine of the updates at the largest and smallest eta."""
    rows = []
    for record in sorted(loaded(results / "weights-eta", "*-erm-*.json"), key=lambda record: record["updates"]):
        for rho, lines in record["eta"].items():
            cells = [interval(lines["0.0001"]["floor"]), interval(lines["0.001"]["floor"]),
                     interval(lines["0.001"]["cosine"], 3)]  # fmt: skip
            rows.append([TASKS[record["task"]], str(record["updates"]), rho, *cells])
    return table(
        ["task", "updates", "rho", "at the floor, eta = 0.0001", "eta = 0.001", "cosine of the updates"], rows
    )


def training_times(results: Path) -> str:
    """Minutes of whole trainings, eager and captured, and the paper's."""
    found = {record["options"]["task"]: record["rows"] for record in loaded(results / "times")}
    theirs, rows = paper.RUNNING_TIME.figures["BERT-base"], []
    for task in [task for task in TASKS if task in found]:
        seconds = {(row["method"], row["way"]): row["seconds"]["median"] for row in found[task]}
        updates = {row["method"]: row["runs"][0]["updates"] for row in found[task]}
        for method in updates:
            eager, captured = seconds[method, "eager"], seconds[method, "captured"]
            ours = [f"{eager / 60:.3f}", f"{eager / seconds['sam', 'eager']:.2f}", f"{captured / 60:.3f}",
                    f"{captured / seconds['sam', 'captured']:.2f}", f"{captured / eager:.2f}"]  # fmt: skip
            minutes = theirs.get(METHODS[method], {}).get(task)
            known = ["-", "-"] if minutes is None else [f"{minutes:g}", f"{minutes / theirs['SAM'][task]:.2f}"]
            rows.append([TASKS[task], method_name(METHODS[method]), str(updates[method]), *ours, *known])
    head = ["task", "method", "updates", "eager, minutes", "x SAM", "captured, minutes", "x SAM", "captured / eager",
            "paper: minutes", "x SAM"]  # fmt: skip
    return table(head, rows)


def coverage(results: Path) -> str:
    """How often 95% intervals contain the true mean."""
    (found,) = loaded(results / "interval-coverage")
    columns = {"a cell": found["cell"], **{f"over {tasks} tasks": at for tasks, at in found["tasks"].items()}}
    rows = [[seeds, *(f"{100 * at[seeds]:.0f}%" for at in columns.values())] for seeds in found["cell"]]
    return table(["seeds", *columns], rows)


def peers(results: Path, *, others: bool) -> str:
    """The checks of ``benchmarks/peers.py``: our methods, and the optimizers of pytorch_optimizer or the others."""
    (record,) = loaded(results / "peers")
    ours, *rest = record["answers"]
    columns = [ours, *(name for name in rest if (" " in name) == others)]
    checks = record["answers"][ours]
    return table(["check", *columns], [[c, *(record["answers"][name][c] for name in columns)] for c in checks])
