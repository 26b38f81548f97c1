"""A plot of differences with their intervals, task beside task, as SVG text readable on light and dark ground."""

from __future__ import annotations

import math
import runpy
from collections.abc import Mapping
from html import escape
from pathlib import Path

STYLE = runpy.run_path(str(Path(__file__).with_name("speed_plots.py")))["STYLE"]
LETTER, WIDTH, GAP = 6.5, 190, 30
TOP, ROW, BOTTOM = 30, 18, 34
ABOVE, BELOW, CHANCE = "#2f9e5f", "#b5532a", "#8a8a8a"
"""The interval lies above 0, below it, or has it in it."""

Value = tuple[float, float, float]
"""Mean, lower and upper end of its interval."""


def forest(found: Mapping[str, Mapping[str, Value]], *, x: str, across: int = 2) -> str:
    """Panels, so many of them in a row, with the names of the methods on the left.

    Args:
        found: For every panel, by title, the difference of each method.
        x: What lies below each panel.
        across: Panels in a row.
    """
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    labels = round(LETTER * max(map(len, names))) + 16
    height = TOP + ROW * len(names) + BOTTOM
    rows = math.ceil(len(found) / across)
    parts = [
        f'<text x="{labels - 8}" y="{row * height + TOP + ROW * (n + 0.5) + 4:.0f}" text-anchor="end">'
        f"{escape(name)}</text>"
        for row in range(rows)
        for n, name in enumerate(names)
    ]
    for number, (title, values) in enumerate(found.items()):
        left, top = labels + (WIDTH + GAP) * (number % across), height * (number // across)
        parts.append(f'<g transform="translate({left} {top})">{_panel(title, values, names, x)}</g>')
    label = escape(f"{x}: {', '.join(found)}")
    size = f"{labels + (WIDTH + GAP) * min(across, len(found))} {height * rows}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" aria-label="{label}">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _panel(title: str, values: Mapping[str, Value], names: list[str], x: str) -> str:
    low, high = min(v[1] for v in values.values()), max(v[2] for v in values.values())
    step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if (high - low) / s <= 5)
    first, last = math.floor(min(low, 0) / step), math.ceil(max(high, 0) / step)
    bottom = TOP + ROW * len(names)

    def place(value: float) -> float:
        return (value / step - first) / (last - first) * WIDTH

    parts = [f'<text x="0" y="18" class="title">{escape(title)}</text>']
    for tick in range(first, last + 1):
        at, looks = f"{place(tick * step):.1f}", 'stroke="#888"' if tick == 0 else 'class="grid"'
        parts.append(f'<line x1="{at}" x2="{at}" y1="{TOP - 4}" y2="{bottom}" {looks}/>')
        parts.append(f'<text x="{at}" y="{bottom + 14}" text-anchor="middle">{tick * step:.3g}</text>')
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{bottom + 29}" text-anchor="middle">{escape(x)}</text>')
    for n, name in enumerate(names):
        if name not in values:
            continue
        mean, start, end = values[name]
        y = TOP + ROW * (n + 0.5)
        colour = ABOVE if start > 0 else BELOW if end < 0 else CHANCE
        parts.append(
            f'<line x1="{place(start):.1f}" x2="{place(end):.1f}" y1="{y:.0f}" y2="{y:.0f}" stroke="{colour}" '
            f'stroke-width="2"/><circle cx="{place(mean):.1f}" cy="{y:.0f}" r="3.5" fill="{colour}">'
            f"<title>{escape(name)}, {escape(title)}: {mean:.2f} [{start:.2f}, {end:.2f}]</title></circle>"
        )
    return "".join(parts)
