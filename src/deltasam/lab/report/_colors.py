"""One colour, dash and marker per method, the same in every plot and safe for colour-blind readers (Okabe and Ito)."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True)
class Look:
    """How a method is drawn.

    Attributes:
        color: Colour, as CSS writes it.
        dash: Dash pattern of its lines, as SVG writes it; empty for a full line.
        marker: Shape of its points: ``circle``, ``square``, ``triangle`` or ``diamond``.
    """

    color: str
    dash: str
    marker: str


_BLACK, _ORANGE, _SKY, _GREEN, _BLUE, _RED, _PINK, _BROWN = (
    "#3d3d3d", "#c98500", "#3a9bd0", "#00805c", "#0063a1", "#c24f00", "#b3578f", "#7a6a00",
)  # fmt: skip
_LOOKS = {
    "ERM": Look(_BLACK, "", "circle"),
    "SAM": Look(_BLUE, "", "square"),
    "DeltaSAM": Look(_RED, "", "diamond"),
    "PerInstanceSAM": Look(_GREEN, "", "triangle"),
    "ERM+RDrop": Look(_PINK, "6 3", "circle"),
    "ERM+R3F": Look(_ORANGE, "6 3", "square"),
    "ERM+SMART": Look(_BROWN, "6 3", "diamond"),
    "FreeLB": Look(_SKY, "6 3", "triangle"),
    "SAM+EmbeddingNoise": Look(_BLUE, "2 3", "square"),
    "DeltaSAM+EmbeddingNoise": Look(_RED, "2 3", "diamond"),
    "ERM+EmbeddingNoise": Look(_ORANGE, "2 3", "square"),
}


def look(method: str) -> Look:
    """How a method is drawn; methods without a look of their own get one from their name, always the same.

    Example:
        >>> look("DeltaSAM").color == look("DeltaSAM+EmbeddingNoise").color
        True
    """
    if method in _LOOKS:
        return _LOOKS[method]
    number = crc32(method.encode())
    colors, dashes, markers = (_PINK, _BROWN, _SKY, _ORANGE), ("8 3 2 3", "1 3"), ("circle", "square", "triangle")
    return Look(colors[number % 4], dashes[number // 4 % 2], markers[number // 8 % 3])
