"""The sections of docs/results.md where the radius is chosen on the task itself: the larger tasks, the second encoder.

The runs lie in the folder of those at one setting for all tasks, whose runs at the setting that was chosen are these.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path

from deltasam.report import read_runs

glue = runpy.run_path(str(Path(__file__).with_name("results_glue.py")))

ABOUT = """The radius{step} as chosen on the task itself: the mean of two seeds on the last tenth of the
training rows, trained on the rest. Bold: chosen."""

FINALS = "Development set, final weights, at the settings chosen."


def larger_section(results: Path) -> str:
    """The larger tasks."""
    sweeps = [f"glue-larger-radii-{name}" for name in ("nli", "qqp", "sst2")]
    return section(results / "glue-larger", "the larger tasks", ", and FreeLB's step,", sweeps)


def second_encoder_section(results: Path) -> str:
    """The second encoder."""
    return section(results / "minilm", "the second encoder", "", ["minilm-radii", "minilm-radii-stsb"])


def section(folder: Path, where: str, step: str, sweeps: Sequence[str]) -> str:
    """What was tried, and the final runs at what was chosen; nothing where nothing was tried."""
    runs = read_runs(folder).finished
    tuning = [run for run in runs if run.split.endswith("]")]
    if not tuning:
        return ""
    tried = {(run.task, run.method) for run in tuning}
    tasks = {task for task, _ in tried}
    finals = [
        run
        for run in runs
        if not run.split.endswith("]")
        if (run.task, run.method) in tried or (run.method == "ERM" and run.task in tasks)
    ]
    commands = [f"    deltasam sweep {glue['SWEEPS']}/{name}.yaml --output results/{folder.name}" for name in sweeps]
    parts = [f"## The radius, chosen on {where}", ABOUT.format(step=step), "\n".join(commands),
             glue["grid_table"](tuning)]  # fmt: skip
    if len({run.method for run in finals}) > 1:
        cells = glue["final_cells"](tuning, finals)
        parts += [FINALS, glue["means"](cells), *glue["differences"](cells, f", radius chosen on {where}")]
    return "\n\n".join(parts)
