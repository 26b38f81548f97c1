"""The primary metric against the adversarial risk."""

from __future__ import annotations

from deltasam.lab.report._figures import axes, draw_points, shorten
from deltasam.lab.report._sections._base import PageRuns, Section


def risk(runs: PageRuns) -> Section | None:
    """One figure per task and model, one point per run."""
    figures = []
    for (task, model), methods in runs.setups.items():
        points = {
            method: [(runs.risks.values[run.run_id], run.score) for run in found if run.run_id in runs.risks.values]
            for method, found in methods.items()
        }
        if any(points.values()):
            primary = next(iter(methods.values()))[0].primary
            (ax,) = axes()
            for method, found in points.items():
                draw_points(ax, method, [x for x, _ in found], [y for _, y in found])
            ax.set_xlabel("adversarial risk")
            ax.set_ylabel(shorten(primary, 34))
            figures.append((f"{primary} against adversarial risk: {task}, {model}", ax.figure))
    title = "Accuracy against adversarial risk"
    return Section(name="risk", title=title, figures=figures, lines=runs.risks.notes) if figures else None
