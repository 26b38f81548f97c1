"""Figures with matplotlib, returned as SVG for the page. The same data always gives the same text."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RC = {
    "svg.fonttype": "none",  # text stays text: smaller, and it can be searched
    "text.parse_math": False,  # names of runs may contain $
    "font.size": 9, "font.sans-serif": ["DejaVu Sans"], "axes.formatter.limits": (-3, 5), "lines.markersize": 5,
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


def draw_line(ax: Axes, method: str, x: Sequence[float], y: Sequence[float], band: Any = None) -> None:
    """Draws a line that ends in the method's marker, with a band of lower and upper values if they differ."""
    style = look(method)
    if band is not None and any(low != high for low, high in zip(*band, strict=True)):
        ax.fill_between(x, *band, color=style.color, alpha=0.13, linewidth=0)
    ax.plot(x, y, color=style.color, linestyle=style.line, linewidth=1.6, marker=style.marker, markevery=[len(x) - 1])


def draw_map(ax: Axes, plane: Mapping[str, Any]) -> None:
    """Draws the loss over a plane, dark where it is low. Losses that are not finite stay white."""
    import numpy as np

    loss = np.ma.masked_where([[not finite(value) for value in row] for row in plane["loss"]], np.array(plane["loss"]))
    # As one image: a fine plane would have thousands of shapes.
    colors = ax.pcolormesh(plane["x"], plane["y"], loss, cmap="viridis", shading="nearest", rasterized=True)
    ax.figure.colorbar(colors, ax=ax, label="loss")
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
    text = re.sub(r'<g id="[^"]*"', "<g", re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL))
    text = re.sub(r"<defs>\s*</defs>|<!--.*?-->", "", text)
    return re.sub(r"\n\s*", "\n", text).replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
