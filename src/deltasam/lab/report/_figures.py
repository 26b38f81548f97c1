"""Figures with matplotlib, returned as SVG for the page. The same data always gives the same text."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from deltasam.lab.report._names import method_name

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TIP = "tip:"  # start of the id of a part with a text for the pointer
_MARKED = 12  # longer lines get no marker at each point: the page would grow

_RC = {
    "svg.fonttype": "none",  # text stays text: smaller, and it can be searched
    "text.parse_math": False,  # names of runs may contain $
    "font.size": 10, "font.sans-serif": ["DejaVu Sans"], "axes.formatter.limits": (-3, 5), "lines.markersize": 5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#59636e",
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": "#d5dae0",
}  # fmt: skip


class Look(NamedTuple):
    """How a method is drawn."""

    color: str  #: Colour.
    line: str  #: Line style.
    marker: str  #: Marker.

    @property
    def sign(self) -> str:
        """The line and the marker as characters, for a legend."""
        dash = {"-": "─", "--": "╌", ":": "┈", "-.": "┄"}[self.line]
        return dash + {"o": "●", "s": "■", "^": "▲", "D": "◆"}[self.marker] + dash


# Safe for colour-blind readers (Okabe and Ito), somewhat darker for lines on white.
_BLACK, _ORANGE, _SKY, _GREEN, _BLUE, _RED, _PINK, _BROWN = (
    "#3d3d3d", "#c98500", "#3a9bd0", "#00805c", "#0063a1", "#c24f00", "#b3578f", "#7a6a00",
)  # fmt: skip
_LOOKS = {
    "ERM": Look(_BLACK, "-", "o"),
    "SAM": Look(_BLUE, "-", "s"),
    "DeltaSAM": Look(_RED, "-", "D"),
    "PerInstanceSAM": Look(_GREEN, "-", "^"),
    "ERM+RDrop": Look(_PINK, "--", "o"),
    "ERM+R3F": Look(_ORANGE, "--", "s"),
    "ERM+SMART": Look(_BROWN, "--", "D"),
    "FreeLB": Look(_SKY, "--", "^"),
    "SAM+EmbeddingNoise": Look(_BLUE, ":", "s"),
    "DeltaSAM+EmbeddingNoise": Look(_RED, ":", "D"),
    "ERM+EmbeddingNoise": Look(_ORANGE, ":", "s"),
}


def look(method: str) -> Look:
    """Returns how a method is drawn. An unknown method gets a look derived from its name.

    Example:
        >>> look("DeltaSAM").color == look("DeltaSAM+EmbeddingNoise").color
        True
    """
    number = crc32(method.encode())
    derived = Look((_PINK, _BROWN, _SKY, _ORANGE)[number % 4], ("-.", ":")[number // 4 % 2], "os^"[number // 8 % 3])
    return _LOOKS.get(method, derived)


def axes(rows: int = 1, *, height: float = 2.0, left: float = 0.9) -> Sequence[Axes]:
    """Returns empty axes below each other in a new figure, with their height and left margin in inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Fixed margins: a layout engine would draw every figure twice.
    width, bottom, top = 4.6, 0.5, 0.2
    full = rows * (height + bottom) + top
    margins = {"left": left / width, "right": 0.97, "bottom": bottom / full, "top": 1 - top / full}
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(width, full))
        return list(figure.subplots(rows, squeeze=False, gridspec_kw={**margins, "hspace": bottom / height})[:, 0])


def figure_of(ax: Axes) -> Figure:
    """Returns the figure of axes."""
    figure: Figure = ax.figure  # type: ignore[assignment]  # never a subfigure
    return figure


def draw_line(
    ax: Axes,
    method: str,
    x: Sequence[float],
    y: Sequence[float],
    band: Any = None,
    labels: Sequence[str] | None = None,
) -> None:
    """Draws a line that ends in the method's marker, with a band of lower and upper values if they differ.

    A pointer over the line shows its last value; over a marker of a short line, the value there.

    Args:
        ax: Where to draw.
        method: The method.
        x: Positions.
        y: Values.
        band: Lower and upper values.
        labels: What the positions are called; by default their numbers.
    """
    style, name = look(method), method_name(method)
    if band is not None and any(low != high for low, high in zip(*band, strict=True)):
        ax.fill_between(x, *band, color=style.color, alpha=0.13, linewidth=0)
    places = labels or [f"{at:g}" for at in x]
    tips = [f"{name}: {value:.4g} at {place}" for value, place in zip(y, places, strict=True)]
    (line,) = ax.plot(x, y, color=style.color, linestyle=style.line, linewidth=1.6)
    add_tip(line, tips[-1])
    points = list(zip(x, y, tips, strict=True))
    draw_points(ax, method, points if len(points) <= _MARKED else points[-1:])


def draw_points(ax: Axes, method: str, points: Iterable[tuple[float, float, str]], *, size: float = 6.5) -> None:
    """Draws the method's marker at each point (x, y), with the text that a pointer over it shows."""
    style = look(method)
    for x, y, tip in points:
        (mark,) = ax.plot([x], [y], style.marker, color=style.color, markersize=size, markeredgecolor="white", mew=0.6)
        add_tip(mark, tip)


def add_tip(artist: Artist, text: str) -> None:
    """Sets the text that the page shows for a pointer over a part of a figure."""
    artist.set_gid(_TIP + text)


def draw_map(ax: Axes, plane: Mapping[str, Any], limits: tuple[float, float] | None = None) -> None:
    """Draws the loss over a plane, dark where it is low. Losses that are not finite stay white.

    Args:
        ax: Where to draw.
        plane: ``x``, ``y`` and the rows of ``loss``.
        limits: The losses at the ends of the colours; by default the lowest and the highest one.
    """
    import numpy as np

    loss = np.ma.masked_where([[not finite(value) for value in row] for row in plane["loss"]], np.array(plane["loss"]))
    # As one image: a fine plane would have thousands of shapes.
    low, high = limits or (None, None)
    given = {"cmap": "viridis", "shading": "nearest", "rasterized": True, "vmin": low, "vmax": high}
    colors = ax.pcolormesh(plane["x"], plane["y"], loss, **given)
    ax.figure.colorbar(colors, ax=ax, label="loss")
    ax.plot([0], [0], "+", color="white", markersize=9, markeredgewidth=1.6)  # the trained weights
    ax.set_xlabel("along the first direction")
    ax.set_ylabel("along the second direction")
    ax.set_aspect("equal")
    ax.grid(visible=False)


def shorten(text: str, limit: int) -> str:
    """Returns the start of a long text."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def finite(value: float) -> bool:
    """Whether a value can be drawn: it is finite, and not so large that differences overflow."""
    return math.isfinite(value) and abs(value) < 1e100


def svg(figure: Figure, title: str) -> str:
    """Returns a figure as an SVG element to put into HTML."""
    import matplotlib as mpl

    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({**_RC, "svg.hashsalt": title}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the browser has other fonts
        figure.savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :].strip()
    # Ids of groups repeat from figure to figure; the style would apply to the whole page.
    text = text.replace(f'<g id="{_TIP}', '<g data-tip="')
    text = re.sub(r'<g id="[^"]*"', "<g", re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL))
    text = re.sub(r"<defs>\s*</defs>|<!--.*?-->", "", text)
    return re.sub(r"\n\s*", "\n", text).replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
