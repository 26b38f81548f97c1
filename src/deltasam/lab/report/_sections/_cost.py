"""What an update costs: time, passes and memory."""

from __future__ import annotations

from statistics import fmean

from deltasam.lab.report._figures import axes, draw_bars
from deltasam.lab.report._sections._base import PageRuns, Section

_COSTS = {
    "milliseconds per update": lambda run: 1000 * run.step_seconds,
    "passes per update (forward + backward)": lambda run: (run.forwards + run.backwards) / run.steps,
    "peak memory, MiB": lambda run: run.memory / 2**20,
}


def cost(runs: PageRuns) -> Section | None:
    """One figure per task and model, with a panel for each cost and a bar for each method."""
    figures = []
    for (task, model), methods in runs.setups.items():
        drawn = axes(len(_COSTS), height=0.1 + 0.25 * len(methods), left=1.8)
        for ax, (label, of_run) in zip(drawn, _COSTS.items(), strict=True):
            draw_bars(ax, {method: fmean(map(of_run, found)) for method, found in methods.items()}, label)
        devices = sorted({run.device for found in methods.values() for run in found})
        figures.append((f"Cost of an update: {task}, {model} ({', '.join(devices)})", drawn[0].figure))
    return Section(name="cost", title="Cost", figures=figures) if figures else None
