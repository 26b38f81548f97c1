"""The section of docs/results.md on running time (the paper's Table 6), from results/times.

The files are written by ``deltasam bench train TASK --json results/times/TASK.json``.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltasam.lab.report import method_name, paper

common = runpy.run_path(str(Path(__file__).with_name("results_common.py")))
table, TASKS = common["table"], common["TASKS"]

METHODS = {
    "erm": "ERM",
    "sam": "SAM",
    "delta-sam": "DeltaSAM",
    "per-instance-sam": "PerInstanceSAM",
    "r-drop": "ERM+RDrop",
}

TIMES = """Minutes of whole trainings by the path of `deltasam train`, one after the other with the GPU to themselves:
loading included, evaluation not. *Captured*: steps recorded as CUDA graphs, the recording included. Ratios are to SAM
run in the same way. The paper's minutes are those of BERT-base, longer schedules and one RTX 2080: compare the ratios.
Its per-instance runs have twice the epochs and a pass per instance.

{machine}"""


def times_section(results: Path) -> str:
    """Minutes per task and method, eager and captured, beside the paper's ratios."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((results / "times").glob("*.json"))]
    by_task = {report["options"]["task"]: report for report in found}
    if not by_task:
        return ""
    rows = [row for task in TASKS if task in by_task for row in rows_of(task, by_task[task])]
    head = ["task", "method", "updates", "eager, minutes", "x SAM", "captured, minutes", "x SAM", "captured / eager",
            "paper: minutes", "x SAM"]  # fmt: skip
    commands = "\n".join(command(task, by_task[task]) for task in TASKS if task in by_task)
    return "\n\n".join(["## Running time", TIMES.format(machine=machines(found)), commands, table(head, rows)])


def machines(reports: Sequence[Mapping[str, Any]]) -> str:
    """On what it was measured."""
    facts = {f"{report['machine']['device']}, torch {report['machine']['torch']}" for report in reports}
    what = {f"{report['options']['model']}, batch {report['options']['batch']}, {report['options']['precision']}"
            for report in reports}  # fmt: skip
    commits = {report["machine"]["commit"][:7] for report in reports}
    return f"{'; '.join(sorted(what))}; {'; '.join(sorted(facts))}; commit {', '.join(sorted(commits))}."


def command(task: str, report: Mapping[str, Any]) -> str:
    """How it was measured."""
    options, rows = report["options"], report["rows"]
    length = f"--steps {options['steps']}" if options["steps"] is not None else f"--epochs {options['epochs']:g}"
    words = ["deltasam bench train", task, *options["settings"], f"--model {options['model']}", length,
             f"--precision {options['precision']} --repeats {options['repeats']}",
             f"--methods {' '.join(dict.fromkeys(row['method'] for row in rows))}",
             f"--ways {' '.join(dict.fromkeys(row['way'] for row in rows))}",
             f"--json results/times/{task}.json"]  # fmt: skip
    return "    " + " ".join(words)


def rows_of(task: str, report: Mapping[str, Any]) -> list[list[str]]:
    """The rows of one task."""
    seconds = {(row["method"], row["way"]): row["seconds"]["median"] for row in report["rows"]}
    updates = {row["method"]: row["runs"][0]["updates"] for row in report["rows"]}
    theirs = paper.RUNNING_TIME.figures["BERT-base"]
    rows = []
    for method in updates:
        known = METHODS.get(method.partition(":")[0], method)
        cells = [TASKS[task], method_name(known), str(updates[method])]
        for way in ("eager", "captured"):
            cells += [minutes(seconds.get((method, way))), ratio(seconds, (method, way), ("sam", way))]
        own = theirs.get(known, {}).get(task)
        sam = theirs["SAM"].get(task)
        cells += [ratio(seconds, (method, "captured"), (method, "eager"))]
        cells += ["-", "-"] if own is None or sam is None else [f"{own:g}", f"{own / sam:.2f}"]
        rows.append(cells)
    return rows


def minutes(seconds: float | None) -> str:
    """Minutes: a small model takes seconds."""
    return "-" if seconds is None else f"{seconds / 60:.3f}"


def ratio(seconds: Mapping[tuple[str, str], float], above: tuple[str, str], below: tuple[str, str]) -> str:
    """The ratio of two times, where both are known."""
    return f"{seconds[above] / seconds[below]:.2f}" if above in seconds and below in seconds else "-"
