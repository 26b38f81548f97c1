"""The plots of the page on speed, as SVG text: lines over a doubling axis, readable on light and dark ground."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Lines = Mapping[str, Sequence[tuple[float, float]]]

WIDTH, HEIGHT = 360, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 44
COLOURS = {"ERM": "#8a8a8a", "SAM": "#3b82c4", "DeltaSAM-ambient": "#d9822b", "PerInstanceSAM": "#2f9e5f"}
STYLE = (
    "text{font:12px sans-serif;fill:#444}.grid{stroke:#888;stroke-opacity:.25}.title{font-weight:bold}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}}"
)


def two_panels(left: Lines, right: Lines, *, x: str, titles: tuple[str, str]) -> str:
    """Two charts side by side: the left one with a logarithmic axis, the right one with ratios.

    Args:
        left: Points (x, y) by name; a name that ends in " eager" is drawn dashed, in the colour of the method.
        right: The same.
        x: What lies below.
        titles: What lies above.
    """
    body = _panel(left, x, titles[0], log=True)
    body += f'<g transform="translate({WIDTH} 0)">{_panel(right, x, titles[1], log=False)}</g>'
    body += _legend([*dict.fromkeys([*left, *right])])
    label = escape(f"{titles[0]}; {titles[1]}, over {x}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT + 44}" role="img" '
        f'aria-label="{label}"><style>{STYLE}</style>{body}</svg>\n'
    )


def _panel(lines: Lines, x: str, title: str, *, log: bool) -> str:
    xs = sorted({a for points in lines.values() for a, _ in points})
    ys = [b for points in lines.values() for _, b in points]
    ticks = _powers(min(ys), max(ys)) if log else _round_numbers(min([0.9, *ys]), max([1.1, *ys]))
    low, high = ticks[0], ticks[-1]

    def down(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def across(value: float) -> float:
        share = math.log(value / xs[0]) / math.log(xs[-1] / xs[0]) if len(xs) > 1 else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    parts = [f'<text x="{LEFT}" y="18" class="title">{escape(title)}</text>']
    parts += [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(tick):.1f}" y2="{down(tick):.1f}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{down(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in ticks
    ]
    last = -math.inf
    for value in xs:
        if across(value) - last >= 34:  # no two labels on top of each other
            last = across(value)
            parts.append(f'<text x="{last:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{value:.0f}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>')
    for name, points in lines.items():
        places = [(across(a), down(b)) for a, b in sorted(points)]
        joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{joined}" fill="none" {_stroke(name)}/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{_colour(name)}"/>' for a, b in places]
    return "".join(parts)


def _legend(names: Sequence[str]) -> str:
    parts, place, row = [], LEFT, 0
    for name in names:
        width = 34 + 6.4 * len(name)
        if place + width > 2 * WIDTH:
            place, row = LEFT, row + 1
        y = HEIGHT + 14 + 18 * row
        parts.append(
            f'<line x1="{place:.0f}" x2="{place + 22:.0f}" y1="{y}" y2="{y}" {_stroke(name)}/>'
            f'<text x="{place + 27:.0f}" y="{y + 4}">{escape(name)}</text>'
        )
        place += width + 14
    return "".join(parts)


def _colour(name: str) -> str:
    return COLOURS.get(name.removesuffix(" eager"), "#888")


def _stroke(name: str) -> str:
    dash = ' stroke-dasharray="5 4"' if name.endswith(" eager") else ""
    return f'stroke="{_colour(name)}" stroke-width="2"{dash}'


def _powers(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... from the one below the least to the one above the most."""
    every = [factor * 10.0**power for power in range(-4, 7) for factor in (1, 2, 5)]
    first = max(n for n, value in enumerate(every) if value <= low)
    last = min(n for n, value in enumerate(every) if value >= high)
    return every[first : max(last, first + 1) + 1]


def _round_numbers(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [round(n * step, 10) for n in range(math.floor(low / step), math.ceil(high / step) + 1)]
