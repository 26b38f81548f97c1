"""The pictures show the numbers that they were given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from deltasam.analysis import calibration, plot_bits, plot_reliability


def test_reliability_shows_the_filled_bins() -> None:
    logits = torch.randn(200, 3)
    found = calibration(logits, logits.argmax(-1).roll(1), bins=10)
    ax = plot_reliability(found, label="random")
    filled = [one for one in found.bins if one.count]
    points = ax.collections[0]
    assert points.get_offsets().tolist() == [[one.confidence, one.accuracy] for one in filled]
    sizes = [size - 4 for size in points.get_sizes()]
    assert [size / sum(sizes) for size in sizes] == pytest.approx([one.count / 200 for one in filled])
    bins = [[one.count, one.confidence, one.accuracy] for one in found.bins]
    assert plot_reliability(bins, ax, label="again") is ax
    assert ax.collections[1].get_offsets().tolist() == points.get_offsets().tolist()
    assert len(ax.lines) == 3, "the diagonal is drawn once"


def test_bits_run_from_many_to_few_and_are_the_ticks_of_all_curves(tmp_path: Path) -> None:
    ax = plot_bits({4: 0.7, 32: 0.9}, label="one", metric="f1")
    plot_bits({32: 0.9, 3: 0.5}, ax, label="other", metric="f1")
    assert ax.lines[0].get_xydata().tolist() == [[32, 0.9], [4, 0.7]]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["3", "4", "32"]
    assert ax.get_xlim()[0] > 32 > 3 > ax.get_xlim()[1]
    assert ax.get_ylabel() == "f1"
    ax.figure.savefig(tmp_path / "bits.svg")
    assert (tmp_path / "bits.svg").stat().st_size > 1000


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="2 bins and no instance"):
        plot_reliability([[0, 0.0, 0.0], [0, 0.0, 0.0]])
    with pytest.raises(ValueError, match="values is empty"):
        plot_bits({})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_bits({4: 0.5})
