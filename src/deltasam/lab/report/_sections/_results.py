"""Two tables that can be sorted: the results of each method, and all runs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from deltasam.lab.report._names import method_name, short_models
from deltasam.lab.report._runs import Run
from deltasam.lab.report._sections._base import PageRuns, Section
from deltasam.lab.report._select import RULE
from deltasam.lab.report._statistics import summarize

_MOST_ROWS = 2000


def results(runs: PageRuns) -> Section | None:
    """One row per task, model and method, with all statistics."""
    import pandas as pd

    rows = []
    for (task, model), methods in runs.setups.items():
        means = {method: fmean(run.score for run in found) for method, found in methods.items()}
        best = (max if next(iter(methods.values()))[0].higher_is_better else min)(means.values())
        for method, found in methods.items():
            values = summarize([run.score for run in found])
            risks = [runs.risks.values[run.run_id] for run in found if run.run_id in runs.risks.values]
            star = " ★" if len(set(means.values())) > 1 and means[method] == best else ""
            rows.append(
                {
                    "task": task,
                    "model": model,
                    "method": method_name(method),
                    "metric": found[0].primary,
                    "runs": str(values.n),
                    "mean": f"{values.mean:.4f}{star}",
                    "std": f"{values.std:.4f}" if values.n > 1 else "–",
                    "95% CI of the mean": f"{values.low:.4f} to {values.high:.4f}",
                    "median": f"{values.median:.4f}",
                    "max": f"{values.max:.4f}",
                    "adversarial risk": f"{fmean(risks):.3f}" if risks else "not measured",
                    "ms per update": f"{fmean(1000 * run.train_seconds / run.steps for run in found):.1f}",
                    "time / ERM": _relative_time(found, methods.get("ERM", [])),
                    "forward/backward": "/".join(
                        f"{fmean(counts):.0f}"
                        for counts in ([run.forwards for run in found], [run.backwards for run in found])
                    ),
                    "peak MiB": f"{fmean(run.memory for run in found) / 2**20:.0f}",
                }
            )
    if not rows:
        return None
    note = f"★ Best mean of the task and model. {RULE}"
    return Section(name="results", title="Results", frame=pd.DataFrame(rows), note=note)


def _relative_time(runs: Sequence[Run], erm: Sequence[Run]) -> str:
    """Time per update relative to ERM, if both ran on the same device."""
    if not erm or {run.device for run in runs} != {run.device for run in erm}:
        return "–"
    return f"{fmean(run.step_seconds for run in runs) / fmean(run.step_seconds for run in erm):.2f}"


def all_runs(runs: PageRuns) -> Section | None:
    """One row per run, for at most 2,000 runs."""
    import pandas as pd

    finished = runs.runs.finished
    short = short_models(run.model for run in finished)
    rows = [
        {
            "run": run.path.name,
            "task": run.task,
            "model": short[run.model],
            "method": method_name(run.method),
            "seed": str(run.seed),
            "metric": run.primary,
            "value": f"{run.score:.4f}",
            "best": f"{run.best:.4f}",
            "updates": str(run.steps),
            "seconds": f"{run.train_seconds:.1f}",
            "settings": ", ".join(f"{name}={value:g}" for name, value in run.settings),
        }
        for run in finished[:_MOST_ROWS]
    ]
    if not rows:
        return None
    rest = len(finished) - _MOST_ROWS
    note = f"and {rest} more; `deltasam table` reads them all" if rest > 0 else ""
    return Section(name="runs", title="All runs", frame=pd.DataFrame(rows), note=note)
