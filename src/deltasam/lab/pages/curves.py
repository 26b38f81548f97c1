"""Lines with intervals: a panel for each title, a line for each arm, points at the same places in all panels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.lines import Line2D

from deltasam.lab.pages.effects import NO_RUNS, Groups, counted
from deltasam.lab.pages.evidence import PLAIN
from deltasam.lab.pages.figures import BLUE, CYCLE, GREEN, GREY, ORANGE, PURPLE, SKY, STYLE, panels, share, svg
from deltasam.lab.pages.statistics import Ends, mean_and_ends, stratified_interval

Line = Mapping[float, Ends]
"""Place -> mean and the ends of its interval."""

_DODGE = 0.06
_MARKERS = "sD^vP"
_LONG = 30  # characters, of which three columns do not fit below the figure
_COLOURS = {"SAM": BLUE, "per-instance SAM": ORANGE, "δ-SAM": GREEN, "R-Drop": PURPLE, "random perturbation": SKY}
"""The same colour for a method in all figures; other arms get those that are left."""


def ends(groups: Groups) -> Ends:
    """The mean over the setups with its interval."""
    groups = counted(groups)
    if len(groups) == 1:
        return mean_and_ends(*groups.values())
    return stratified_interval(groups)


@rc_context(STYLE)
def curves(parts: Mapping[str, Mapping[str, Line]], xlabel: str, ylabel: str | Sequence[str], names: Sequence[str],
           places: Sequence[float], *, zero: bool = False, share_rows: bool = False) -> str:  # fmt: skip
    """Draws the lines; places are drawn at equal distances and named by ``names``.

    Lines are shifted a little against each other, so that intervals do not hide each other. Panels without any point
    say so: the runs may not exist yet. ``zero``: a line at 0; ``share_rows``: one y axis for both panels of a row.
    """
    rows = -(-len(parts) // 2)
    axes = panels(len(parts), (8.4 if len(parts) > 1 else 6.4, (3.8 if rows < 3 else 2.6) * rows))
    arms = list(dict.fromkeys(arm for lines in parts.values() for arm in lines))
    looks = _looks([arm for arm in arms if arm != PLAIN])
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
        if zero:
            each.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    if share_rows:
        share(axes[: len(parts)], "y")
    for each in axes[len(parts) :]:
        each.remove()
    handles = [Line2D([], [], label="plain training" if arm == PLAIN else arm, **looks[arm]) for arm in arms]
    if handles:
        wide = max(map(len, arms)) > _LONG
        axes[0].figure.legend(handles=handles, loc="outside lower center", ncols=2 if wide else 3, frameon=False)
    drawn = {title: {arm: list(line.items()) for arm, line in lines.items()} for title, lines in parts.items()}
    return svg(axes[0].figure, drawn)


def _looks(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dash of every arm. An arm has the colour of its method, unless another one has it already."""
    colours = {arm: _COLOURS[arm] for arm in arms if arm in _COLOURS}
    for arm in arms:
        method = re.split(r",| \(", arm)[0]
        if arm not in colours and _COLOURS.get(method) not in (None, *colours.values()):
            colours[arm] = _COLOURS[method]
    left = [colour for colour in CYCLE if colour not in colours.values()] or list(CYCLE)
    looks: dict[str, dict[str, Any]] = {PLAIN: {"color": GREY, "marker": "o", "markersize": 4}}
    for place, arm in enumerate(arms):
        others = sum(each not in colours for each in arms[:place])
        dash = "-" if arm in colours or others < len(left) else "--"
        colour = colours.get(arm, left[others % len(left)])
        looks[arm] = {"color": colour, "marker": _MARKERS[place % len(_MARKERS)], "linestyle": dash, "markersize": 4}
    return looks
