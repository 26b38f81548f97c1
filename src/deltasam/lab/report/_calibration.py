"""The section on calibration: reliability diagrams, and the errors of the probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from deltasam.lab.report._figures import add_tip, axes, draw_points, figure_of, look
from deltasam.lab.report._names import method_name
from deltasam.lab.report._results import interval_of
from deltasam.lab.report._runs import Bins, Run
from deltasam.lab.report._section import PageRuns, Section, setup_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = {
    "ECE": "ece", "NLL": "nll", "Brier": "brier", "temperature": "temperature", "ECE, scaled": "ece_scaled",
    "NLL, scaled": "nll_scaled", "Brier, scaled": "brier_scaled",
}  # fmt: skip


def calibration(runs: PageRuns) -> Section | None:
    """Reliability diagrams of each task and model, pooled over the seeds, and a table of the errors."""
    figures, rows = [], []
    for (task, model), methods in runs.setups.items():
        pooled = {method: _pooled(found) for method, found in methods.items()}
        for name in dict.fromkeys(name for bins in pooled.values() for name in bins):
            drawn = {method: bins[name] for method, bins in pooled.items() if len(bins.get(name, ())) > 1}
            if drawn:
                figures.append((f"Reliability {_panel(name)}: {setup_title(task, model)}", _diagram(drawn)))
        for method, found in methods.items():
            measured = {name: _mean(found, key) for name, key in _COLUMNS.items()}
            measured["ECE, 95% interval"] = _interval(found)
            measured["ECE, scaled, 95% interval"] = _interval(found, "_scaled")
            if measured["ECE"] or measured["NLL"]:
                row = {
                    "method": method_name(method),
                    **measured,
                    "seeds": str(len(found)),
                    "task": task,
                    "model": model,
                }
                rows.append(row)
    used = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    rows = [{name: row[name] or "–" for name in used} for row in rows]
    intro = (
        "On the diagonal, the confidence of the model is the share of correct answers; below it, the model is "
        "overconfident. Larger markers hold more rows. Scaled: after temperature scaling, fitted on other rows."
    )
    if not figures and not rows:
        return None
    return Section(name="calibration", title="Calibration", intro=intro, figures=figures, rows=rows)


def _mean(runs: Sequence[Run], key: str) -> str:
    values = [run.metrics[key] for run in runs if key in run.metrics]
    return f"{fmean(values):.4f}" if values else ""


def _interval(runs: Sequence[Run], suffix: str = "") -> str:
    """The interval of ECE over the seeds; that of a single run over its rows."""
    name, low, high = (f"{key}{suffix}" for key in ("ece", "ece_low", "ece_high"))
    ends = interval_of([run.metrics[name] for run in runs if name in run.metrics])
    if ends is not None:
        return f"{ends[0]:.4f} to {ends[1]:.4f}"
    own = runs[0].metrics
    single = len(runs) == 1 and {low, high} <= own.keys()
    return f"{own[low]:.4f} to {own[high]:.4f} (rows)" if single else ""


def _pooled(runs: Sequence[Run]) -> dict[str, Bins]:
    """The bins of all runs together: counts add up, confidences and accuracies are means over the rows."""
    found = {}
    for name in dict.fromkeys(name for run in runs for name in run.reliability):
        every = [run.reliability[name] for run in runs if name in run.reliability]
        bins = []
        for same in zip(*every, strict=False):
            count = sum(n for n, _, _ in same)
            if count:
                sums = [sum(one[0] * one[k] for one in same) / count for k in (1, 2)]
                bins.append((count, sums[0], sums[1]))
        found[name] = tuple(bins)
    return found


def _diagram(found: Mapping[str, Bins]) -> Figure:
    (ax,) = axes(height=2.6)
    ax.plot([0, 1], [0, 1], color="#59636e", linewidth=0.8, linestyle="--")
    for method, bins in found.items():
        style, name, total = look(method), method_name(method), sum(count for count, _, _ in bins)
        x, y = [confidence for _, confidence, _ in bins], [right for *_, right in bins]
        (line,) = ax.plot(x, y, color=style.color, linestyle=style.line, linewidth=1)
        add_tip(line, name)
        for count, confidence, right in bins:
            tip = f"{name}: confidence {confidence:.3f}, correct {right:.3f}, {count:,.0f} rows"
            draw_points(ax, method, [(confidence, right, tip)], size=3.5 + 6 * (count / total) ** 0.5)
    low = min(min(confidence, right) for bins in found.values() for _, confidence, right in bins)
    ax.set_xlim(max(0.0, low - 0.05), 1.02)
    ax.set_ylim(max(0.0, low - 0.05), 1.02)
    ax.set_ylabel("share correct")
    ax.set_xlabel("confidence")
    return figure_of(ax)


def _panel(name: str) -> str:
    return {"evaluation": "as trained", "scaled": "after temperature scaling"}.get(name, name.replace("_", " ", 1))
