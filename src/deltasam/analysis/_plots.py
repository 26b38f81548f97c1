"""Two pictures of a trained classifier: reliability, and a metric against the bits per weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from deltasam.analysis._calibration import Calibration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LARGEST = 220.0  # area of the marker of a bin with all instances, in square points


def plot_reliability(
    calibration: Calibration | Sequence[Sequence[float]], ax: Axes | None = None, *, label: str | None = None
) -> Axes:
    """Draws a reliability diagram: accuracy against confidence, one marker per bin. Needs matplotlib.

    On the diagonal, the confidence is right; below it, the model is too sure. The area of a marker grows with the
    share of its instances. Empty bins are left out.

    Args:
        calibration: What :func:`calibration` returns, or bins ``[count, confidence, accuracy]`` as in the field
            ``reliability`` of a run's ``result.json``.
        ax: Axes of matplotlib, for several models in one diagram. New ones by default.
        label: Name of the model in the legend.

    Returns:
        The axes. ``ax.figure.savefig("reliability.svg")`` writes the picture.

    Raises:
        ValueError: All bins are empty.

    Example:
        >>> import torch
        >>> from deltasam.analysis import calibration
        >>> found = calibration(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]), bins=5)
        >>> ax = plot_reliability(found, label="ERM")
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('confidence', 'accuracy')
    """
    rows = (
        [(one.count, one.confidence, one.accuracy) for one in calibration.bins]
        if isinstance(calibration, Calibration)
        else calibration
    )
    filled = [(count, confidence, accuracy) for count, confidence, accuracy in rows if count]
    if not filled:
        raise ValueError(f"calibration has {len(rows)} bins and no instance in them; pass those of at least one")
    counts, confidences, accuracies = zip(*filled, strict=True)
    if ax is None:
        ax = _new_axes()
    if not ax.lines:
        ax.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle=":")
        ax.set(xlabel="confidence", ylabel="accuracy", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    (line,) = ax.plot(confidences, accuracies, marker=".", linewidth=1, label=label)
    sizes = [_LARGEST * count / sum(counts) + 4 for count in counts]
    ax.scatter(confidences, accuracies, s=sizes, color=line.get_color(), alpha=0.7)
    if label is not None:
        ax.legend(frameon=False)
    return ax


def plot_bits(
    values: Mapping[int, float], ax: Axes | None = None, *, label: str | None = None, metric: str = "accuracy"
) -> Axes:
    """Draws a metric against the bits per weight, from many to few. Needs matplotlib.

    Args:
        values: The metric by number of bits. Use 32 (or 16) for the weights as they were trained.
        ax: Axes of matplotlib, for several models in one picture. New ones by default.
        label: Name of the model in the legend.
        metric: Name of the metric, for the axis.

    Returns:
        The axes. ``ax.figure.savefig("bits.svg")`` writes the picture.

    Raises:
        ValueError: There are no values.

    Example:
        >>> ax = plot_bits({32: 0.86, 8: 0.86, 4: 0.82, 3: 0.61}, label="ERM")
        >>> ax = plot_bits({32: 0.86, 8: 0.86, 4: 0.85, 3: 0.74}, ax, label="SAM")
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['ERM', 'SAM']
    """
    if not values:
        raise ValueError("values is empty; pass a mapping from bits to the metric, such as {32: 0.86, 4: 0.82}")
    if ax is None:
        ax = _new_axes()
    bits = sorted(values, reverse=True)
    ax.plot(bits, [values[each] for each in bits], marker="o", linewidth=1.5, label=label)
    drawn = sorted({int(x) for line in ax.lines for x in line.get_xdata()})
    ax.set_xscale("log", base=2)
    ax.set_xticks(drawn, [str(each) for each in drawn])
    ax.set_xticks([], minor=True)
    ax.set(xlabel="bits per weight", ylabel=metric, xlim=(drawn[-1] * 1.15, drawn[0] / 1.15))
    if label is not None:
        ax.legend(frameon=False)
    return ax


def _new_axes() -> Axes:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib, or 'deltasam[lab]'") from error
    return Figure(figsize=(4.2, 3.6), layout="constrained").subplots()
