"""Plots of values with intervals, place beside place, as SVG text readable on light and dark ground."""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

STYLE = runpy.run_path(str(Path(__file__).with_name("speed_plots.py")))["STYLE"]
WIDTH, HEIGHT = 360, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 34, 44
COLOURS = ("#d9822b", "#b5532a", "#7a3b8f", "#3b82c4", "#8a8a8a", "#2f9e5f")
CORRELATIONS = (-0.5, 0.0, 0.5, 1.0)
"""The ticks of an axis of correlations."""

Value = tuple[float, float, float] | None
"""Mean, lower and upper end of its interval."""


def panels(
    found: Mapping[str, Mapping[str, Sequence[Value]]],
    *,
    places: Sequence[str],
    x: str,
    ticks: Sequence[Sequence[float]] = (CORRELATIONS, CORRELATIONS),
) -> str:
    """Charts side by side with one legend.

    Args:
        found: For every panel, by title, the values of each line, one for every place; None where there is none.
        places: What stands below the places.
        x: What lies below all.
        ticks: Those of every panel, at equal distances.
    """
    names = list(dict.fromkeys(name for lines in found.values() for name in lines))
    looks = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    body = "".join(
        f'<g transform="translate({WIDTH * number} 0)">{_panel(lines, places, x, title, looks, ticks[number])}</g>'
        for number, (title, lines) in enumerate(found.items())
    )
    label = escape("; ".join(found) + f", over {x}")
    height = HEIGHT + 26 + 18 * ((len(names) - 1) // 3)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(found)} {height}" role="img" '
        f'aria-label="{label}"><style>{STYLE}</style>{body}{_legend(looks)}</svg>\n'
    )


def _panel(
    lines: Mapping[str, Sequence[Value]],
    places: Sequence[str],
    x: str,
    title: str,
    looks: Mapping[str, str],
    ticks: Sequence[float],
) -> str:
    each = (WIDTH - LEFT - RIGHT) / len(places)

    def down(value: float) -> float:
        first, last, room = ticks[0], ticks[-1], (ticks[1] - ticks[0]) / 2  # half a step below the first
        share = (min(max(value, first - room), last) - first + room) / (last - first + room)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="18" class="title">{escape(title)}</text>']
    parts += [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(tick):.1f}" y2="{down(tick):.1f}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{down(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in ticks
    ]
    parts += [
        f'<text x="{LEFT + (n + 0.5) * each:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">'
        f"{escape(place)}</text>"
        for n, place in enumerate(places)
    ]
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>')
    for number, (name, values) in enumerate(lines.items()):
        aside = (number - (len(lines) - 1) / 2) * min(7.0, 0.8 * each / len(lines))  # intervals beside each other
        for n, value in enumerate(values):
            if value is None:
                continue
            mean, low, high = value
            at = LEFT + (n + 0.5) * each + aside
            parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{down(low):.1f}" y2="{down(high):.1f}" '
                f'stroke="{looks[name]}" stroke-width="2"/>'
                f'<circle cx="{at:.1f}" cy="{down(mean):.1f}" r="3" fill="{looks[name]}">'
                f"<title>{escape(name)}, {escape(places[n])}: {mean:.2f} [{low:.2f}, {high:.2f}]</title></circle>"
            )
    return "".join(parts)


def _legend(looks: Mapping[str, str]) -> str:
    parts = []
    for number, (name, colour) in enumerate(looks.items()):
        place, y = LEFT + 225 * (number % 3), HEIGHT + 14 + 18 * (number // 3)
        parts.append(
            f'<circle cx="{place}" cy="{y}" r="4" fill="{colour}"/>'
            f'<text x="{place + 9}" y="{y + 4}">{escape(name)}</text>'
        )
    return "".join(parts)
