"""The section on other evaluation sets: the same weights on data of other domains."""

from __future__ import annotations

from statistics import fmean

from deltasam.lab.report._names import method_name
from deltasam.lab.report._results import unit_of
from deltasam.lab.report._section import PageRuns, Section


def other_sets(runs: PageRuns) -> Section | None:
    """A row for each method and evaluation set of ``task.evaluate_on``, with the change to the task's own set."""
    rows = []
    for (task, model), methods in runs.setups.items():
        for method, found in methods.items():
            unit, start = unit_of(found), f"{found[0].primary}_on_"
            for metric in dict.fromkeys(name for run in found for name in run.metrics if name.startswith(start)):
                name = metric.removeprefix(start)
                pairs = [(run.metrics[metric], run.score) for run in found if metric in run.metrics]
                calibration = [run.metrics[f"ece_on_{name}"] for run in found if f"ece_on_{name}" in run.metrics]
                rows.append(
                    {
                        "method": method_name(method),
                        "mean": unit.text(fmean(there for there, _ in pairs)),
                        "on": name,
                        "metric": found[0].primary + unit.suffix,
                        "change to own set": unit.text(fmean(there - own for there, own in pairs), sign=True),
                        "ECE": f"{fmean(calibration):.4f}" if calibration else "–",
                        "seeds": str(len(pairs)),
                        "trained on": task,
                        "model": model,
                    }
                )
    return Section(name="other-sets", title="Other evaluation sets", rows=rows) if rows else None
