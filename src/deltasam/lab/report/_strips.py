"""Dot plots inside table rows: a strip per row, one axis per table. Positions are percentages of the width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from deltasam.lab.report._figures import Look

_MARGIN = 4.0  # percent on each side, so that no marker is cut off
_SHAPES = {  # around the position of the mean
    "o": '<circle r="5"/>',
    "s": '<path d="M-4.5-4.5h9v9h-9z"/>',
    "^": '<path d="M0-6l5.5 10h-11z"/>',
    "D": '<path d="M0-6.2l6.2 6.2-6.2 6.2-6.2-6.2z"/>',
}


class Axis(NamedTuple):
    """The common axis of the strips of a table."""

    low: float  #: Value at the left end.
    high: float  #: Value at the right end.
    ticks: tuple[float, ...]  #: Values with a label.

    def place(self, value: float) -> float:
        """Returns the position of a value in percent of the width."""
        share = (value - self.low) / (self.high - self.low)
        return round(_MARGIN + (100 - 2 * _MARGIN) * share, 2)

    def labels(self) -> list[tuple[float, str]]:
        """Returns the positions and texts of the ticks."""
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
        if step < 1e-6:
            return [(self.place(tick), f"{tick:g}".replace("-", "−")) for tick in self.ticks]
        decimals = len(f"{round(step, 9):f}".rstrip("0").partition(".")[2])
        return [(self.place(tick), f"{tick:.{decimals}f}".replace("-", "−")) for tick in self.ticks]


def axis_for(values: Iterable[float], *, most_ticks: int = 5) -> Axis:
    """Returns an axis that holds all values, with round ticks.

    Example:
        >>> axis_for([0.82, 0.9]).ticks
        (0.82, 0.84, 0.86, 0.88, 0.9)
    """
    from matplotlib.ticker import MaxNLocator

    given = list(values)
    low, high = min(given), max(given)
    if low == high:
        low, high = low - (abs(low) / 100 or 1.0), high + (abs(high) / 100 or 1.0)
    ticks = [
        round(float(tick), 12) for tick in MaxNLocator(most_ticks, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    ]
    room = 1e-9 * (high - low)
    return Axis(low, high, tuple(tick for tick in ticks if low - room <= tick <= high + room))


def strip(
    axis: Axis,
    look: Look,
    *,
    mean: float,
    tip: str,
    dots: Sequence[float] = (),
    interval: tuple[float, float] | None = None,
    reference: float | None = None,
) -> str:
    """Returns the SVG of one row: small dots for the runs, a bar for the interval, the method's marker at the mean.

    Args:
        axis: The axis of the table.
        look: How the method is drawn.
        mean: Position of the marker.
        tip: What a pointer over the row shows.
        dots: The single values.
        interval: Ends of the bar.
        reference: Position of the dashed line.
    """
    lines = [f'<line class="tick" x1="{x}%" x2="{x}%" y1="0" y2="26"/>' for x, _ in axis.labels()]
    if reference is not None:
        x = axis.place(reference)
        lines.append(f'<line class="reference" x1="{x}%" x2="{x}%" y1="0" y2="26"/>')
    if interval is not None:
        low, high = map(axis.place, interval)
        lines.append(f'<line class="interval" x1="{low}%" x2="{high}%" y1="13" y2="13"/>')
    lines += [f'<circle class="run" cx="{axis.place(dot)}%" cy="13" r="2.5"/>' for dot in dots]
    shape = _SHAPES[look.marker]
    lines.append(f'<svg class="mean" x="{axis.place(mean)}%" y="13" overflow="visible">{shape}</svg>')
    text = escape(tip)
    return (
        f'<svg class="strip" role="img" aria-label="{text}" data-tip="{text}" style="color: {look.color}" '
        f'width="100%" height="26">{"".join(lines)}</svg>'
    )
