"""The section on cost: time, passes and memory of an update, relative to plain training."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from deltasam.lab.report._figures import look
from deltasam.lab.report._names import method_name, method_order
from deltasam.lab.report._runs import Run
from deltasam.lab.report._section import Card, PageRuns, Section, View
from deltasam.lab.report._strips import axis_for, strip

_PLAIN = "ERM"


def cost(runs: PageRuns) -> Section | None:
    """One dot plot per model and device: a dot per task, relative to plain training where there is such a run."""
    groups: dict[tuple[str, str], dict[str, dict[str, list[Run]]]] = {}
    for (task, model), methods in runs.setups.items():
        for method, found in methods.items():
            for device in sorted({run.device for run in found}):
                own = [run for run in found if run.device == device]
                groups.setdefault((model, device), {}).setdefault(method, {})[task] = own
    cards = [_card(model, device, methods) for (model, device), methods in sorted(groups.items())]
    intro = (
        "Marker: mean over the tasks. Small dots: tasks. Times are comparable only if the machine did nothing else."
    )
    return Section(name="cost", title="Cost", intro=intro, cards=cards) if cards else None


def _card(model: str, device: str, methods: dict[str, dict[str, list[Run]]]) -> Card:
    plain = methods.get(_PLAIN, {})
    # A step that is replayed as a CUDA graph is faster; such runs are compared to their like only.
    ratios = {
        method: {
            task: _milliseconds(found) / _milliseconds(plain[task])
            for task, found in tasks.items()
            if task in plain and {run.captured for run in found} == {run.captured for run in plain[task]}
        }
        for method, tasks in methods.items()
    }
    relative = any(ratios[method] for method in methods if method != _PLAIN)
    drawn = (
        ratios if relative else {m: {t: _milliseconds(f) for t, f in tasks.items()} for m, tasks in methods.items()}
    )
    rows = []
    for method in sorted(methods, key=method_order):
        every = [run for found in methods[method].values() for run in found]
        times = [_milliseconds(found) for found in methods[method].values()]
        values = list(drawn[method].values())
        main = f"{fmean(values):.2f}×" if relative else f"{fmean(values):.1f}"
        rows.append(
            {
                "method": method_name(method), "look": look(method), "best": False, "tasks": drawn[method],
                "mean": main if values else "–",
                "ms per update": _span(times),
                "forward + backward": f"{_per_update(every, 'forwards')} + {_per_update(every, 'backwards')}",
                "peak MiB": _span([run.memory / 2**20 for run in every], "{:,.0f}"),
                "runs": str(len(every)),
            }
        )  # fmt: skip
    values = [value for tasks in drawn.values() for value in tasks.values()]
    return Card(
        title=model,
        about=f"{device}. Time of an update{' relative to plain training' if relative else ' in milliseconds'}.",
        head="time" if relative else "ms",
        rows=rows,
        columns=["ms per update", "forward + backward", "peak MiB", "runs"],
        views=[_view(rows, [*values, 1.0] if relative else [*values, 0.0], relative)] if len(values) > 1 else [],
    )


def _view(rows: Sequence[dict[str, Any]], values: Sequence[float], relative: bool) -> View:
    axis = axis_for(values)
    strips = []
    for row in rows:
        tasks = row["tasks"]
        shown = [f"{task}: {value:.2f}×" if relative else f"{task}: {value:.1f} ms" for task, value in tasks.items()]
        strips.append(
            strip(
                axis,
                row["look"],
                mean=fmean(tasks.values()),
                tip="\n".join([f"{row['method']}: {row['mean']}", *shown[:12]]),
                dots=list(tasks.values()) if len(tasks) > 1 else [],
                reference=1.0 if relative else None,
            )
            if tasks
            else ""
        )
    return View(label="time relative to plain training" if relative else "ms per update", axis=axis, strips=strips)


def _milliseconds(runs: Sequence[Run]) -> float:
    return fmean(1000 * run.step_seconds for run in runs)


def _per_update(runs: Sequence[Run], passes: str) -> str:
    return f"{fmean(getattr(run, passes) / run.steps for run in runs):.3g}"


def _span(values: Sequence[float], form: str = "{:.1f}") -> str:
    """The range of the values as text; one number if both ends are written alike."""
    ends = dict.fromkeys(form.format(value) for value in (min(values), max(values)))
    return " to ".join(ends)
