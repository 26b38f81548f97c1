"""The plot of the section on delta-SAM's weights, as SVG text: values with intervals, model by model."""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

STYLE = runpy.run_path(str(Path(__file__).with_name("speed_plots.py")))["STYLE"]
WIDTH, HEIGHT = 360, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 34, 44
COLOURS = ("#d9822b", "#b5532a", "#7a3b8f", "#3b82c4", "#8a8a8a", "#2f9e5f")
TICKS = (-0.5, 0.0, 0.5, 1.0)

Value = tuple[float, float, float] | None
"""Mean, lower and upper end of its interval."""


def panels(found: Mapping[str, Mapping[str, Sequence[Value]]], *, models: Sequence[str], x: str) -> str:
    """Charts side by side with one legend, all of rank correlations.

    Args:
        found: For every panel, by title, the values of each line, one for every model; None where there is none.
        models: What stands below the places.
        x: What lies below all.
    """
    names = list(dict.fromkeys(name for lines in found.values() for name in lines))
    looks = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    body = "".join(
        f'<g transform="translate({WIDTH * number} 0)">{_panel(lines, models, x, title, looks)}</g>'
        for number, (title, lines) in enumerate(found.items())
    )
    label = escape("; ".join(found) + f", over {x}")
    height = HEIGHT + 26 + 18 * ((len(names) - 1) // 3)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(found)} {height}" role="img" '
        f'aria-label="{label}"><style>{STYLE}</style>{body}{_legend(looks)}</svg>\n'
    )


def _panel(
    lines: Mapping[str, Sequence[Value]], models: Sequence[str], x: str, title: str, looks: Mapping[str, str]
) -> str:
    each = (WIDTH - LEFT - RIGHT) / len(models)
    parts = [f'<text x="{LEFT}" y="18" class="title">{escape(title)}</text>']
    parts += [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_down(tick):.1f}" y2="{_down(tick):.1f}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{_down(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in TICKS
    ]
    parts += [
        f'<text x="{LEFT + (n + 0.5) * each:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">'
        f"{escape(model)}</text>"
        for n, model in enumerate(models)
    ]
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>')
    for number, (name, values) in enumerate(lines.items()):
        aside = (number - (len(lines) - 1) / 2) * min(7.0, 0.8 * each / len(lines))  # intervals beside each other
        for n, value in enumerate(values):
            if value is None:
                continue
            mean, low, high = value
            place = LEFT + (n + 0.5) * each + aside
            parts.append(
                f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{_down(low):.1f}" y2="{_down(high):.1f}" '
                f'stroke="{looks[name]}" stroke-width="2"/>'
                f'<circle cx="{place:.1f}" cy="{_down(mean):.1f}" r="3" fill="{looks[name]}">'
                f"<title>{escape(name)}, {escape(models[n])}: {mean:.2f} [{low:.2f}, {high:.2f}]</title></circle>"
            )
    return "".join(parts)


def _down(value: float) -> float:
    share = (min(max(value, TICKS[0] - 0.25), TICKS[-1]) - TICKS[0] + 0.25) / (TICKS[-1] - TICKS[0] + 0.25)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _legend(looks: Mapping[str, str]) -> str:
    parts = []
    for number, (name, colour) in enumerate(looks.items()):
        place, y = LEFT + 225 * (number % 3), HEIGHT + 14 + 18 * (number // 3)
        parts.append(
            f'<circle cx="{place}" cy="{y}" r="4" fill="{colour}"/>'
            f'<text x="{place + 9}" y="{y + 4}">{escape(name)}</text>'
        )
    return "".join(parts)
