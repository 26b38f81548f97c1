"""The sections of docs/results.md where the radius is chosen on the task itself: the larger tasks, the second encoder.

The runs lie in the folder of those at one setting for all tasks, whose runs at the setting that was chosen are these.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from deltasam.lab.report import Run, method_name, read_runs

glue = runpy.run_path(str(Path(__file__).with_name("results_glue.py")))

ABOUT = """The radius{step} as chosen on the task itself: the mean of two seeds on the last tenth of the
training rows, trained on the rest. Bold: chosen."""

FINALS = "Development set, final weights, at the settings chosen."

GAIN = """The score at the setting that was chosen, less the one at the setting for all tasks, paired by seed; = where
the two are the same."""

Cells = dict[str, dict[str, list[Run]]]
"""Task -> method -> runs of the final weights, by seed."""


def larger_section(results: Path) -> str:
    """The larger tasks."""
    sweeps = [f"glue-larger-radii-{name}" for name in ("nli", "qqp", "sst2")]
    at_one = glue["larger_cells"](results)
    return section(results / "glue-larger", "the larger tasks", ", and FreeLB's step,", sweeps, at_one)


def second_encoder_section(results: Path) -> str:
    """The second encoder."""
    sweeps = ["minilm-radii", "minilm-radii-stsb"]
    return section(results / "minilm", "the second encoder", "", sweeps, glue["second_encoder_cells"](results))


def section(folder: Path, where: str, step: str, sweeps: Sequence[str], at_one: Cells) -> str:
    """What was tried, the final runs at what was chosen, and what the choice gave; nothing where nothing was tried."""
    tuning, cells = chosen(folder)
    if not tuning:
        return ""
    commands = [f"    deltasam sweep {glue['SWEEPS']}/{name}.yaml --output results/{folder.name}" for name in sweeps]
    parts = [f"## The radius, chosen on {where}", ABOUT.format(step=step), "\n".join(commands),
             glue["grid_table"](tuning)]  # fmt: skip
    if len(glue["methods_of"](cells)) > 1:
        parts += [FINALS, glue["means"](cells), *glue["differences"](cells, f", radius chosen on {where}")]
        gave = gains(cells, at_one)
        parts += [f"### What the choice gave, {where}", GAIN, *gave] if gave else []
    return "\n\n".join(parts)


def chosen(folder: Path) -> tuple[list[Run], Cells]:
    """The runs that chose, and the final ones at what they chose, with plain training on the same tasks."""
    runs = read_runs(folder).finished
    tuning = [run for run in runs if run.split.endswith("]")]
    tried = {(run.task, run.method) for run in tuning}
    tasks = {task for task, _ in tried}
    finals = [
        run
        for run in runs
        if not run.split.endswith("]")
        if (run.task, run.method) in tried or (run.method == "ERM" and run.task in tasks)
    ]
    return tuning, glue["final_cells"](tuning, finals)


def gains(cells: Cells, at_one: Cells) -> list[str]:
    """A row for every method whose choice differs from the one setting on some task; nothing where none does."""
    rows, means = [], []
    for method in glue["methods_of"](cells):
        texts = []
        for task, at in cells.items():
            text, values = gain(at.get(method, []), at_one.get(task, {}).get(method, []))
            texts.append(text)
            means += [fmean(values)] if values else []
        rows += [[method_name(method), *texts]] if any("[" in text for text in texts) else []
    if not rows:
        return []
    found = str(glue["table"](["method", *(glue["TASKS"][task] for task in cells)], rows))
    return [found, f"Mean over the choices that differ ({len(means)}): {fmean(means):.1f} points."]


def gain(ours: Sequence[Run], at_one: Sequence[Run]) -> tuple[str, list[float]]:
    """The differences by seed, none where the same setting was chosen ("=") or one of them was not run ("-")."""
    if not ours or not at_one:
        return "-", []
    if ours[0].settings == at_one[0].settings:
        return "=", []
    theirs = {run.seed: glue["primary"](run) for run in at_one}
    both = [glue["primary"](run) - theirs[run.seed] for run in ours if run.seed in theirs]
    return (str(glue["with_interval"](both, 2)), both) if both else ("-", [])
