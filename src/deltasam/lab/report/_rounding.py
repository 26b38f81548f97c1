"""The section on rounded weights: the primary metric against the number of bits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from deltasam.lab.report._figures import axes, draw_line, figure_of, shorten
from deltasam.lab.report._names import method_name
from deltasam.lab.report._results import interval_of, unit_of
from deltasam.lab.report._runs import Run
from deltasam.lab.report._section import PageRuns, Section, setup_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = {"": "groups of 64 inputs", "_channel": "one scale per output channel"}
_TRAINED = "as trained"


def rounding(runs: PageRuns) -> Section | None:
    """One figure per task and model with a panel for each way of rounding, and a table of the same numbers."""
    figures, rows = [], []
    for (task, model), methods in runs.setups.items():
        primary = next(iter(methods.values()))[0].primary
        unit = unit_of([run for found in methods.values() for run in found])
        bits = {kind: _bits([run for found in methods.values() for run in found], primary, kind) for kind in _KINDS}
        panels = {kind: widths for kind, widths in bits.items() if widths}
        for method, found in methods.items():
            row = {"method": method_name(method), _TRAINED: unit.text(fmean(run.score for run in found))}
            for kind, widths in panels.items():
                for width in widths:
                    values = _values(found, f"{primary}_{width}bit{kind}")
                    name = f"{width} bits{', channel' if kind else ''}"
                    row[name] = unit.text(fmean(values)) if values else "–"
            if len(row) > 2:
                rows.append({**row, "seeds": str(len(found)), "task": task, "model": model, "metric": primary})
        for kind, widths in panels.items():
            title = f"{primary} after rounding, {_KINDS[kind]}: {setup_title(task, model)}"
            figures.append((title, _figure(methods, primary, kind, widths)))
    intro = (
        "The weights are rounded to the nearest value after the training. Band: 95% interval, for three seeds or more."
    )
    rows = [{**dict.fromkeys(_columns(rows), "–"), **row} for row in rows]
    return Section(name="rounding", title="Rounded weights", intro=intro, figures=figures, rows=rows) if rows else None


def _columns(rows: Sequence[dict[str, str]]) -> list[str]:
    """All columns, those that every row has first and last as in the longest row."""
    longest = max(rows, key=len)
    return list(dict.fromkeys([*longest, *(name for row in rows for name in row)]))


def _bits(runs: Sequence[Run], primary: str, kind: str) -> list[int]:
    """The numbers of bits that were measured, most first."""
    form = re.compile(rf"{re.escape(primary)}_(\d+)bit{kind}")
    found = {int(match[1]) for run in runs for name in run.metrics if (match := form.fullmatch(name))}
    return sorted(found, reverse=True)


def _values(runs: Sequence[Run], metric: str) -> list[float]:
    return [run.metrics[metric] for run in runs if metric in run.metrics]


def _figure(methods: dict[str, list[Run]], primary: str, kind: str, widths: Sequence[int]) -> Figure:
    (ax,) = axes()
    names = [primary, *(f"{primary}_{width}bit{kind}" for width in widths)]
    labels = [_TRAINED, *(f"{width} bits" for width in widths)]
    for method, found in methods.items():
        points = [(place, _values(found, name)) for place, name in enumerate(names)]
        kept = [(place, values) for place, values in points if values]
        if len(kept) > 1:
            ends = [interval_of(values) or (fmean(values), fmean(values)) for _, values in kept]
            band = [low for low, _ in ends], [high for _, high in ends]
            tips = [labels[place] for place, _ in kept]
            draw_line(ax, method, [place for place, _ in kept], [fmean(values) for _, values in kept], band, tips)
    ax.set_xticks(range(len(names)), labels)
    ax.set_ylabel(shorten(primary, 34))
    ax.set_xlabel(_KINDS[kind])
    return figure_of(ax)
