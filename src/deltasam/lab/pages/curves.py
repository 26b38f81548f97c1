"""Lines with intervals: a panel for each title, a line for each arm, points at the same places in all panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.lines import Line2D

from deltasam.lab.pages.effects import NO_RUNS, Groups, counted
from deltasam.lab.pages.evidence import PLAIN
from deltasam.lab.pages.figures import CYCLE, GREY, STYLE, panels, svg
from deltasam.lab.pages.statistics import Ends, mean_and_ends, stratified_interval

Line = Mapping[float, Ends]
"""Place -> mean and the ends of its interval."""

_DODGE = 0.06
_MARKERS = "sD^vP"
_LONG = 30  # characters, of which three columns do not fit below the figure


def ends(groups: Groups) -> Ends:
    """The mean over the setups with its interval."""
    groups = counted(groups)
    if len(groups) == 1:
        return mean_and_ends(*groups.values())
    return stratified_interval(groups)


@rc_context(STYLE)
def curves(parts: Mapping[str, Mapping[str, Line]], xlabel: str, ylabel: str | Sequence[str], names: Sequence[str],
           places: Sequence[float]) -> str:  # fmt: skip
    """Draws the lines; places are drawn at equal distances and named by ``names``.

    Lines are shifted a little against each other, so that intervals do not hide each other. Panels without any point
    say so: the runs may not exist yet.
    """
    axes = panels(len(parts), (8.4, 3.8 * -(-len(parts) // 2)))
    arms = list(dict.fromkeys(arm for lines in parts.values() for arm in lines))
    others = [arm for arm in arms if arm != PLAIN]
    looks: dict[str, dict[str, Any]] = {PLAIN: {"color": GREY, "marker": "o", "markersize": 4}}
    for place, arm in enumerate(others):
        colour, marker = CYCLE[place % len(CYCLE)], _MARKERS[place % len(_MARKERS)]
        dash = "-" if place < len(CYCLE) else "--"
        looks[arm] = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 4}
    labels = [ylabel] * len(parts) if isinstance(ylabel, str) else ylabel
    for each, (title, lines), label in zip(axes, parts.items(), labels, strict=False):
        for number, (arm, line) in enumerate(lines.items()):
            shift = _DODGE * (number - (len(lines) - 1) / 2)
            at = [list(places).index(place) + shift for place in line]
            each.plot(at, [mean for mean, _, _ in line.values()], **looks[arm])
            for x, (_, low, high) in zip(at, line.values(), strict=True):
                each.plot([x, x], [low, high], color=looks[arm]["color"], linewidth=1.2)
        if not any(lines.values()):
            each.text(0.5, 0.5, NO_RUNS, transform=each.transAxes, ha="center")
        each.set_xticks(range(len(places)), names)
        each.set(title=title, xlabel=xlabel, ylabel=label, xlim=(-0.4, len(places) - 0.6))
    for each in axes[len(parts) :]:
        each.remove()
    handles = [Line2D([], [], label=arm, **looks[arm]) for arm in arms]
    if handles:
        wide = max(map(len, arms)) > _LONG
        axes[0].figure.legend(handles=handles, loc="outside lower center", ncols=2 if wide else 3, frameon=False)
    drawn = {title: {arm: list(line.items()) for arm, line in lines.items()} for title, lines in parts.items()}
    return svg(axes[0].figure, drawn)
