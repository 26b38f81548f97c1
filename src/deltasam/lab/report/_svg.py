"""Small charts as SVG text: axes with round numbers, lines with bands, points, bars, maps. Everything is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from deltasam.lab.report._colors import Look

WIDTH, HEIGHT = 420, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 44


@dataclass(frozen=True)
class Series:
    """Points of one method.

    Attributes:
        label: Its name.
        look: How it is drawn.
        x: Where.
        y: How much.
        low: Lower end of a band around the line; none if empty.
        high: Upper end.
    """

    label: str
    look: Look
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = field(default=())
    high: Sequence[float] = field(default=())


def line_chart(series: Sequence[Series], *, title: str, x: str, y: str) -> str:
    """Lines over a common axis, with bands where there are several runs."""
    frame = _Frame.around(series)
    body = []
    for one in series:
        color = one.look.color
        if one.low and any(low != high for low, high in zip(one.low, one.high, strict=True)):
            edge = [*zip(one.x, one.high, strict=True), *reversed(list(zip(one.x, one.low, strict=True)))]
            points = " ".join(frame.at(*point) for point in edge)
            body.append(f'<polygon points="{points}" fill="{color}" fill-opacity="0.13"/>')
        points = " ".join(frame.at(*point) for point in zip(one.x, one.y, strict=True))
        dash = f' stroke-dasharray="{one.look.dash}"' if one.look.dash else ""
        body.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        last = [mark(one.look, *frame.place(one.x[-1], one.y[-1]), one.label)] if one.x else []
        body += last
    return frame.chart(body, title=title, x=x, y=y)


def scatter_chart(series: Sequence[Series], *, title: str, x: str, y: str) -> str:
    """Points."""
    frame = _Frame.around(series, pad=0.08)
    body = [
        mark(one.look, *frame.place(a, b), f"{one.label}: {a:.4g}, {b:.4g}")
        for one in series
        for a, b in zip(one.x, one.y, strict=True)
    ]
    return frame.chart(body, title=title, x=x, y=y)


def bar_chart(bars: Sequence[tuple[str, Look, float]], *, title: str, x: str) -> str:
    """Horizontal bars from 0, each with its value."""
    height = 30 + 26 * len(bars)
    largest = max((value for _, _, value in bars), default=0.0) or 1.0
    body = []
    for row, (label, style, value) in enumerate(bars):
        top = 8 + 26 * row
        width = max(1.0, 190 * value / largest)
        body.append(
            f'<text x="132" y="{top + 13}" text-anchor="end">{_short(label, 19)}</text>'
            f'<rect x="138" y="{top}" width="{width:.1f}" height="18" fill="{style.color}">'
            f"<title>{escape(label)}: {value:.4g}</title></rect>"
            f'<text x="{144 + width:.1f}" y="{top + 13}">{_plain(value)}</text>'
        )
    body.append(f'<text x="138" y="{height - 6}" class="axis">{escape(x)}</text>')
    return _svg(body, title, height)


def map_chart(x: Sequence[float], y: Sequence[float], z: Sequence[Sequence[float]], *, title: str, unit: str) -> str:
    """A map of z over x and y, dark where it is low; its colours keep their order in grey, too."""
    flat = [value for row in z for value in row if math.isfinite(value)]
    low, high = min(flat), max(flat)
    side = min((WIDTH - 100) / len(x), (HEIGHT - 40) / len(y))
    body = []
    for j, row in enumerate(z):
        for i, value in enumerate(row):
            share = (min(value, high) - low) / ((high - low) or 1.0) if math.isfinite(value) else 1.0
            size = f'width="{side + 0.5:.1f}" height="{side + 0.5:.1f}"'
            body.append(
                f'<rect x="{58 + i * side:.1f}" y="{8 + (len(y) - 1 - j) * side:.1f}" {size} fill="{_heat(share)}">'
                f"<title>({x[i]:.3g}, {y[j]:.3g}): {value:.4g}</title></rect>"
            )
    bottom = 8 + len(y) * side
    body.append(
        f'<text x="58" y="{bottom + 16:.0f}" class="axis">{x[0]:.3g} to {x[-1]:.3g}; {escape(unit)} '
        f"{low:.3g} (dark) to {high:.3g} (light)</text>"
    )
    return _svg(body, title, HEIGHT)


def mark(look: Look, x: float, y: float, label: str) -> str:
    """A point in the shape and colour of its method."""
    shapes = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"',
        "square": f'<rect x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"',
        "triangle": f'<polygon points="{x:.1f},{y - 5:.1f} {x - 4.6:.1f},{y + 3.6:.1f} {x + 4.6:.1f},{y + 3.6:.1f}"',
        "diamond": f'<path d="M{x:.1f},{y - 5:.1f} l5,5 l-5,5 l-5,-5 z"',
    }
    return f'{shapes[look.marker]} fill="{look.color}" stroke="#fff"><title>{escape(label)}</title>{_end(look.marker)}'


def _end(marker: str) -> str:
    return {"circle": "</circle>", "square": "</rect>", "triangle": "</polygon>", "diamond": "</path>"}[marker]


@dataclass(frozen=True)
class _Frame:
    """The axes: which numbers lie where."""

    x_ticks: list[float]
    y_ticks: list[float]
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    @classmethod
    def around(cls, series: Sequence[Series], pad: float = 0.0) -> _Frame:
        xs = [x for one in series for x in one.x]
        ys = [y for one in series for y in (*one.y, *one.low, *one.high)]
        (x_low, x_high), (y_low, y_high) = (_range(values, p) for values, p in ((xs, pad), (ys, max(pad, 0.04))))
        whole = all(float(x).is_integer() for x in xs)  # updates: no tick between two of them
        return cls(_ticks(x_low, x_high, whole=whole), _ticks(y_low, y_high), (x_low, x_high), (y_low, y_high))

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        up = (y - self.y_range[0]) / (self.y_range[1] - self.y_range[0])
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    def at(self, x: float, y: float) -> str:
        across, down = self.place(x, y)
        return f"{across:.1f},{down:.1f}"

    def chart(self, body: list[str], *, title: str, x: str, y: str) -> str:
        grid = []
        for tick in self.y_ticks:
            _, down = self.place(self.x_range[0], tick)
            grid.append(
                f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}" class="grid"/>'
                f'<text x="{_LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{tick:.6g}</text>'
            )
        for tick in self.x_ticks:
            across, _ = self.place(tick, self.y_range[0])
            grid.append(f'<text x="{across:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:.6g}</text>')
        middle = (_TOP + HEIGHT - _BOTTOM) / 2
        below = f'x="{(WIDTH + _LEFT) / 2:.0f}" y="{HEIGHT - 8}"'
        beside = f'transform="translate(13 {middle:.0f}) rotate(-90)"'
        axes = "".join(
            f'<text {place} text-anchor="middle" class="axis">{_short(text, limit)}</text>'
            for place, text, limit in ((below, x, 50), (beside, y, 34))
        )
        return _svg([*grid, *body, axes], title, HEIGHT)


def _svg(body: Sequence[str], title: str, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(body)}</svg>"
    )


def _range(values: Sequence[float], pad: float) -> tuple[float, float]:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    return low - pad * (high - low), high + pad * (high - low)


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """About five round numbers between the two; whole ones if asked for."""
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    step = max(step, 1) if whole else step
    first = math.ceil(low / step)
    return [round(number * step, 12) for number in range(first, math.floor(high / step) + 1)]


def _heat(share: float) -> str:
    """From dark blue over teal to light yellow, ever lighter."""
    stops = ((20, 30, 80), (30, 110, 140), (110, 180, 120), (250, 240, 160))
    place = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    at = min(int(place), len(stops) - 2)
    mixed = [round(a + (b - a) * (place - at)) for a, b in zip(stops[at], stops[at + 1], strict=True)]
    return f"rgb({mixed[0]},{mixed[1]},{mixed[2]})"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _short(text: str, limit: int) -> str:
    return escape(text if len(text) <= limit else text[: limit - 1] + "…")
