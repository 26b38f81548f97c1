"""Calibration, rounded weights, other sets, forgetting and sharpness: drawn where the runs have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltasam.lab.report import html_report, read_runs
from deltasam.lab.report._calibration import calibration
from deltasam.lab.report._forgetting import forgetting
from deltasam.lab.report._other_sets import other_sets
from deltasam.lab.report._rounding import rounding
from deltasam.lab.report._section import PageRuns
from deltasam.lab.report._sections import sharpness
from helpers.reports import bins, write_measured_runs, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> PageRuns:
    folder = tmp_path_factory.mktemp("runs")
    write_measured_runs(folder)
    return PageRuns(read_runs(folder))


def test_runs_without_measurements_have_no_such_section(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path, seed=seed)
    plain = PageRuns(read_runs(tmp_path))
    assert [make(plain) for make in (calibration, rounding, other_sets, forgetting, sharpness)] == [None] * 5


def test_reliability_is_pooled_over_the_rows_of_all_seeds(tmp_path: Path) -> None:
    for seed, (count, right) in enumerate([(100, 0.5), (300, 0.9)]):
        write_run(tmp_path, seed=seed, reliability={"evaluation": [[count, 0.8, right], [50, 0.95, 0.9], [0, 0, 0]]})
    found = calibration(PageRuns(read_runs(tmp_path)))
    ((title, figure),) = found.figures
    assert title == "Reliability as trained: reviews, tiny"
    line = figure.axes[0].lines[1]  # after the diagonal
    assert list(line.get_xdata()) == pytest.approx([0.8, 0.95])
    assert list(line.get_ydata()) == pytest.approx([0.8, 0.9])


def test_calibration_has_a_diagram_for_each_evaluation_and_a_table(runs: PageRuns) -> None:
    found = calibration(runs)
    assert [title.partition(":")[0] for title, _ in found.figures] == [
        "Reliability as trained", "Reliability after temperature scaling", "Reliability on films",
    ]  # fmt: skip
    assert found.frame[["method", "ECE", "temperature", "ECE, scaled"]].values.tolist()[0] == [
        "ERM", "0.1000", "1.5000", "0.0300",
    ]  # fmt: skip


def test_one_run_has_the_interval_of_its_rows_and_two_have_none(tmp_path: Path) -> None:
    metrics = {"ece": 0.1, "ece_low": 0.05, "ece_high": 0.12}
    metrics |= {"ece_scaled": 0.03, "ece_low_scaled": 0.01, "ece_high_scaled": 0.04}
    write_run(tmp_path, seed=1, metrics=metrics)
    (row,) = calibration(PageRuns(read_runs(tmp_path))).rows
    assert row["ECE, 95% interval"] == "0.0500 to 0.1200 (rows)"
    assert row["ECE, scaled, 95% interval"] == "0.0100 to 0.0400 (rows)"
    write_run(tmp_path, seed=2, metrics=metrics)
    assert "ECE, 95% interval" not in calibration(PageRuns(read_runs(tmp_path))).rows[0]


def test_broken_bins_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, reliability={"evaluation": [[1, 2]], "scaled": bins(0.1), "on_x": 3})
    (run,) = read_runs(tmp_path).finished
    assert list(run.reliability) == ["scaled"]
    write_run(tmp_path / "other", reliability=[1])
    assert read_runs(tmp_path / "other").finished[0].reliability == {}


def test_rounding_has_a_line_for_each_method_and_a_figure_for_each_kind(runs: PageRuns) -> None:
    found = rounding(runs)
    assert len(found.figures) == 2
    for _, figure in found.figures:
        (ax,) = figure.axes
        assert [label.get_text() for label in ax.get_xticklabels()] == ["as trained", "8 bits", "4 bits", "3 bits"]
        lines = [list(line.get_ydata()) for line in ax.lines if len(line.get_xdata()) > 1]
        assert lines[0] == pytest.approx([0.804, 0.804, 0.774, 0.604])
        assert len(lines) == 3
    assert found.rows[0]["4 bits"] == "77.40"
    assert found.rows[0]["3 bits, channel"] == "60.40"


def test_other_sets_show_the_change(runs: PageRuns) -> None:
    first = other_sets(runs).rows[0]
    assert (first["method"], first["mean"], first["on"]) == ("ERM", "70.40", "films")
    assert first["change to own set"] == "−10.00"


def test_forgetting_is_drawn_against_the_radius_of_methods_with_several(runs: PageRuns) -> None:
    found = forgetting(runs)
    assert [title.partition(":")[0] for title, _ in found.figures] == [
        "forgetting against the radius", "accuracy against the radius",
    ]  # fmt: skip
    plain, line = (one for one in found.figures[0][1].axes[0].lines if len(one.get_xdata()) > 1)
    assert list(plain.get_ydata()) == pytest.approx([0.12, 0.12])
    assert list(line.get_xdata()) == [0.01, 0.05]
    assert list(line.get_ydata()) == pytest.approx([0.115, 0.095])
    assert [row["radius"] for row in found.rows] == ["–", "0.01", "0.05", "0.01"]


def test_sharpness_at_different_radii_is_in_different_figures(tmp_path: Path) -> None:
    log = [{"step": step, "loss": 0.7 - step / 10, "sharpness": 0.1} for step in (1, 2)]
    for method, rho in (("SAM", 0.05), ("DeltaSAM", 0.05), ("PerInstanceSAM", 0.005)):
        write_run(tmp_path, method, rho=rho, log=log)
    found = sharpness(PageRuns(read_runs(tmp_path)))
    lines = {title: sum(len(line.get_xdata()) > 1 for line in figure.axes[0].lines) for title, figure in found.figures}
    assert lines == {"Sharpness, radius 0.05: reviews, tiny": 2, "Sharpness, radius 0.005: reviews, tiny": 1}


def test_values_of_a_figure_are_shown_at_the_pointer(runs: PageRuns) -> None:
    page = html_report(runs.runs, [])
    assert 'data-tip="ERM: 0.774 at 4 bits"' in page
    assert 'data-tip="SAM: 0.095 at 0.05"' in page
