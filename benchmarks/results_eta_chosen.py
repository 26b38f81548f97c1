"""The section of docs/results.md where delta-SAM's radius and eta are both chosen, over the paper's grids."""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path

from deltasam.lab.report import Run, read_runs

glue = runpy.run_path(str(Path(__file__).with_name("results_glue.py")))
gain = runpy.run_path(str(Path(__file__).with_name("results_chosen.py")))["gain"]
table, with_interval, primary, TASKS = (glue[name] for name in ("table", "with_interval", "primary", "TASKS"))

ABOUT = """delta-SAM in the tables above has eta = 1e-4. Here eta is chosen, too, together with the radius: all pairs
of the paper's grids, the mean of two seeds on the last tenth of the training set. Bold: chosen. The runs at eta = 1e-4
are those of the tables above.

    deltasam sweep configs/sweeps/evidence/glue-eta.yaml --output results/glue-eta"""

MOVED = """What eta moves by itself: the score at each eta less the one at 1e-4, over {pairs} pairs of runs that
differ in nothing else (radii up to {largest}, which learn every task)."""

GAVE = """Development set, final weights, at the pair that was chosen, and what it is above the others by seed; = where
the pair is the one of the tables above."""

LARGEST = 0.02  # at 0.05 CoLA learns nothing, whatever eta
LEAST = 1e-4


def eta_section(results: Path) -> str:
    """What was tried, what eta moves, and the final runs; nothing where nothing was tried."""
    runs = read_runs(results / "glue-eta").finished
    tuning = [run for run in runs if run.split.endswith("]")]
    if not tuning:
        return ""
    moved, pairs = moves(tuning)
    parts = ["## The radius and eta, both chosen", ABOUT, glue["grid_table"](tuning),
             MOVED.format(pairs=pairs, largest=LARGEST), moved]  # fmt: skip
    gave = finals(results, tuning, [run for run in runs if not run.split.endswith("]")])
    return "\n\n".join([*parts, *([GAVE, gave] if gave else [])])


def moves(tuning: Sequence[Run]) -> tuple[str, int]:
    """A row for every eta above the least, a column for every task; and how many runs stand behind a cell."""
    tasks = [task for task in TASKS if any(run.task == task for run in tuning)]
    rows, pairs = [], 0
    for eta in sorted({dict(run.settings)["eta"] for run in tuning} - {LEAST}):
        columns = [list(by_seed(tuning, task, eta)) for task in tasks]
        pairs = max(map(len, columns))
        rows.append([f"{eta:g}", *(with_interval(values, 2) if values else "-" for values in columns)])
    return str(table(["eta", *(TASKS[task] for task in tasks)], rows)), pairs


def by_seed(tuning: Sequence[Run], task: str, eta: float) -> Iterator[float]:
    """The differences to the least eta at the same radius and seed."""
    found = {(dict(r.settings)["rho"], dict(r.settings)["eta"], r.seed): primary(r) for r in tuning if r.task == task}
    for (rho, own, seed), score in found.items():
        if own == eta and rho <= LARGEST and (rho, LEAST, seed) in found:
            yield score - found[rho, LEAST, seed]


def finals(results: Path, tuning: Sequence[Run], runs: Sequence[Run]) -> str:
    """A row for every task: the pair, its score, and the differences to the runs of the tables above."""
    others = glue["small_cells"](results)
    rows = []
    for task, methods in glue["final_cells"](tuning, runs).items():
        ours = methods["DeltaSAM"]
        rho, eta = glue["values_of"](ours[0].settings, ("rho", "eta"))
        above = [gain(ours, others.get(task, {}).get(name, []))[0] for name in ("DeltaSAM", "SAM", "ERM")]
        rows.append([TASKS[task], f"{rho:g}, {eta:g}", with_interval(map(primary, ours), 1), *above])
    head = ["task", "rho, eta", "delta-SAM", "less eta = 1e-4", "less SAM", "less plain training"]
    return str(table(head, rows)) if rows else ""
