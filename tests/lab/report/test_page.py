"""The page: complete, self-contained, and safe against the names and texts of runs."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.report import TABLES, html_report, read_runs
from deltasam.lab.report._figures import axes, draw_line, draw_map, look, svg
from deltasam.lab.report._section import PageRuns, Section
from deltasam.lab.report._sections import SECTIONS, all_runs
from helpers.hostile import HOSTILE, hostile_runs
from helpers.reports import write_run

GOLDEN = Path(__file__).parent / "golden"
MAKE = {make.__name__: make for make in SECTIONS}


class Checker(HTMLParser):
    """Collects tags, and checks that they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not any(name.startswith("on") for name, _ in attributes), attributes
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(folder: Path) -> str:
    runs = read_runs(folder)
    return html_report(runs, [make(runs) for make in TABLES.values()], title="Test")


@pytest.fixture(scope="module")
def golden() -> str:
    return page(GOLDEN / "runs")


def section(name: str, folder: Path) -> Section | None:
    """A section of the page of a folder."""
    return MAKE[name](PageRuns(read_runs(folder)))


def test_every_section_and_figure_is_there(golden: str) -> None:
    names = ("warnings", "results", "tests", "cost", "curves", "risk", "sharpness", "weights", "glue", "sts", "runs")
    for name in names:
        assert f'<section id="{name}">' in golden
        assert f'<a href="#{name}">' in golden
    checker = Checker()
    checker.feed(golden)
    assert not checker.open
    assert golden.index('id="results"') < golden.index('id="cost"') < golden.index('id="curves"')
    assert checker.seen.count("figure") == golden.count("<figcaption>") == golden.count('<svg role="img"') > 20
    assert checker.seen.count("script") == 1
    assert "rise of the loss when perturbed" in golden
    assert "cpu, 1 thread." in golden


def test_the_same_runs_give_the_same_page() -> None:
    assert page(GOLDEN / "runs/summarization") == page(GOLDEN / "runs/summarization")


def test_ids_in_figures_are_unique(golden: str) -> None:
    ids = re.findall(r' id="([^"]*)"', golden)
    assert len(ids) == len(set(ids))


def test_nothing_is_loaded_from_anywhere(golden: str) -> None:
    assert "default-src 'none'" in golden
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", golden)
    assert not re.search(r"url\((?!#)", golden)
    assert "@import" not in golden
    assert len(golden) < 1_000_000


def test_hostile_strings_are_shown_as_text(tmp_path: Path) -> None:
    hostile_runs(GOLDEN / "runs", tmp_path)
    text = page(tmp_path)
    checker = Checker()
    checker.feed(text)
    assert checker.seen.count("script") == 1
    assert "img" not in checker.seen
    for value in HOSTILE:
        assert value not in text or "<" not in value
    assert "&lt;script&gt;" in text


def test_dollars_in_names_are_not_formulas() -> None:
    (ax,) = axes()
    ax.set_ylabel("$x^2$ & <b>")
    assert "$x^2$ &amp; &lt;b&gt;" in svg(ax.figure, "title")


def test_the_same_look_for_a_method_everywhere(golden: str) -> None:
    looks = [look(m) for m in ("ERM", "SAM", "DeltaSAM", "PerInstanceSAM", "ERM+RDrop", "ERM+R3F", "FreeLB")]
    assert len({one.color for one in looks}) == len(looks)
    assert look("GSAM") == look("GSAM")
    assert golden.count(look("DeltaSAM").color) > 10


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "deep/report.html"
    command = [sys.executable, "-m", "deltasam", "report"]
    subprocess.run([*command, str(GOLDEN / "runs/summarization"), "-o", str(out)], check=True, capture_output=True)
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    empty = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert empty.returncode == 2
    assert "no finished run" in empty.stderr


def test_the_import_loads_nothing_heavy() -> None:
    heavy = ("torch", "pandas", "matplotlib", "jinja2", "scipy", "rich")
    code = f"import deltasam.lab.report, sys; print(*(name for name in {heavy} if name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_a_page_without_runs_has_a_note(tmp_path: Path) -> None:
    assert "no finished run" in html_report(read_runs(tmp_path), [])


@pytest.mark.parametrize("value", [math.nan, 1e300, 10**400], ids=["nan", "1e300", "400 digits"])
def test_odd_numbers_in_a_log_do_not_break_the_figures(tmp_path: Path, value: float) -> None:
    shutil.copytree(GOLDEN / "runs/summarization", tmp_path, dirs_exist_ok=True)
    for log in tmp_path.rglob("metrics.jsonl"):
        entries = [{"step": 1, "loss": value}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 0.4}]
        lines = [*map(json.dumps, entries), '{"step": 4, "lo']
        log.write_text("\n".join(lines))
    found = section("learning_curves", tmp_path)
    assert found is not None
    (title, figure), *_ = found.figures
    assert {tuple(line.get_xdata()) for line in figure.axes[0].lines if len(line.get_xdata()) > 1} == {(2.0, 3.0)}
    assert "nan" not in svg(figure, title)


@pytest.mark.parametrize(
    "line", [b'{"step": 1, "loss": null}', b'{"step": 1, "loss": "0.5"}', b'{"loss": 0.5}', b'{"step": "x"}', b"\xff"]
)
def test_invalid_entries_of_a_log_are_left_out(tmp_path: Path, line: bytes) -> None:
    before = [run.log() for run in read_runs(GOLDEN / "runs/summarization").finished]
    shutil.copytree(GOLDEN / "runs/summarization", tmp_path, dirs_exist_ok=True)
    for log in tmp_path.rglob("metrics.jsonl"):
        log.write_bytes(line + b"\n" + log.read_bytes())
    after = [[entry for entry in run.log() if entry != {"step": 1}] for run in read_runs(tmp_path).finished]
    assert after == before


def measured(tmp_path: Path, measurement: str, found: dict[str, Any]) -> Path:
    """A folder with one run that has one measurement."""
    one = next(path.parent for path in sorted((GOLDEN / "runs").rglob("result.json")))
    shutil.copytree(one, tmp_path / "one", ignore=shutil.ignore_patterns("analysis"))
    (tmp_path / "one/analysis").mkdir()
    (tmp_path / f"one/analysis/{measurement}.json").write_text(json.dumps(found))
    return tmp_path


def with_landscape(tmp_path: Path, losses: list[float], plane: dict[str, Any]) -> Path:
    lines = {"a line": {"x": list(range(len(losses))), "loss": losses}}
    return measured(tmp_path, "landscape", {"lines": lines, "planes": {"a plane": plane}})


def test_the_landscape_omits_losses_that_are_not_finite(tmp_path: Path) -> None:
    plane = {"x": [0.0, 1.0], "y": [0.0, 1.0]}
    partly = {**plane, "loss": [[0.1, math.nan], [0.2, 0.3]]}
    found = section("landscape", with_landscape(tmp_path / "some", [0.5, math.inf, math.nan, 0.7], partly))
    assert found is not None
    (map_title, _), (line_title, figure) = found.figures
    assert map_title.startswith("Loss along a plane")
    assert line_title.startswith("Loss along a line")
    assert list(figure.axes[0].lines[0].get_xdata()) == [0, 3]
    nowhere = {**plane, "loss": [[math.nan, math.inf], [math.inf, math.nan]]}
    none = with_landscape(tmp_path / "none", [math.nan, math.inf], nowhere)
    assert section("landscape", none) is None
    warned = section("warnings", none)
    assert warned is None or not any("altered" in line for line in warned.problems)


@pytest.mark.parametrize(
    "plane",
    [
        {"x": [], "y": [], "loss": []},
        {"x": [0, 1, 2], "y": [0, 1], "loss": [[1, 2], [1, 2], [1, 2]]},
        {"x": [0, math.nan], "y": [0, 1], "loss": [[1, 2], [1, 2]]},
    ],
    ids=["empty", "transposed", "nan on the axis"],
)
def test_a_plane_whose_shape_does_not_match_its_axes_is_not_measured(tmp_path: Path, plane: dict[str, Any]) -> None:
    folder = with_landscape(tmp_path, [0.5, 0.7], plane)
    assert section("landscape", folder) is None
    assert any("landscape.json is truncated or altered" in line for line in section("warnings", folder).problems)


def test_a_line_has_a_band_only_if_the_runs_differ() -> None:
    one, other = axes(2)
    draw_line(one, "SAM", [1, 2], [0.1, 0.9], ([0.1, 0.9], [0.1, 0.9]))
    draw_line(other, "SAM", [1, 2], [0.1, 0.9], ([0.0, 0.9], [0.2, 0.9]))
    assert [len(ax.collections) for ax in (one, other)] == [0, 1]


def test_no_tick_is_between_two_updates() -> None:
    found = section("learning_curves", GOLDEN / "runs/summarization")
    ticks = [tick for _, figure in found.figures for ax in figure.axes for tick in ax.get_xticks()]
    assert ticks
    assert all(float(tick).is_integer() for tick in ticks)


def test_a_map_has_its_first_row_at_the_bottom_and_its_lowest_loss_darkest() -> None:
    (ax,) = axes()
    draw_map(ax, {"x": [0.0, 1.0], "y": [0.0, 1.0], "loss": [[1.0, 2.0], [3.0, math.nan]]})
    (mesh,) = ax.collections
    assert not ax.yaxis_inverted()
    assert mesh.get_array().filled(-1).ravel().tolist() == [1, 2, 3, -1]
    colors = mesh.to_rgba(mesh.get_array()).reshape(4, 4)
    assert list(colors[:3, :3].sum(axis=1)) == sorted(colors[:3, :3].sum(axis=1))
    assert colors[:, 3].tolist() == [1, 1, 1, 0]  # losses that are not finite are transparent


def test_maps_of_a_setup_have_the_same_colours_and_named_axes(tmp_path: Path) -> None:
    for seed, high in ((1, 2.0), (2, 5.0)):
        folder = write_run(tmp_path, seed=seed)
        plane = {"x": [0.0, 1.0], "y": [0.0, 1.0], "loss": [[1.0 / seed, 1.5], [1.5, high]]}
        (folder / "analysis").mkdir()
        (folder / "analysis/landscape.json").write_text(json.dumps({"lines": {}, "planes": {"a plane": plane}}))
    found = section("landscape", tmp_path)
    assert len(found.figures) == 2
    for _, figure in found.figures:
        ax, bar = figure.axes
        assert ax.get_xlabel()
        assert ax.get_ylabel()
        assert bar.get_ylabel() == "loss"
        assert ax.collections[0].get_clim() == (0.5, 5.0)


def test_weights_are_drawn_and_examples_listed(tmp_path: Path) -> None:
    examples = [{"weight": 2.0, "rank": 1, "text": "heavy <b>"}, {"weight": 0.125, "rank": 3, "text": "light" * 50}]
    wrong = {"count": 2, "weight": 1.5, "others": 0.75}
    content = {"weights": [0.125, 0.5, 2.0], "examples": examples, "wrong_labels": wrong}
    folder = measured(tmp_path, "instance-weights", content)
    found = section("weights", folder)
    (line,) = found.lines
    assert "2 rows with a wrong label have a mean weight of 1.500, the others 0.750" in line
    (figure,) = [figure for title, figure in found.figures if title.startswith("Weights g at the end")]
    assert list(figure.axes[0].lines[0].get_ydata()) == [0.125, 0.5, 2.0]
    text = found.frame_html()
    assert "<td>heavy &lt;b&gt;</td>" in text
    assert f"<td>{'light' * 50}</td>" in text
    assert found.frame[["g", "rank"]].values.tolist() == [["2", 1], ["0.125", 3]]


def test_rows_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = PageRuns(read_runs(GOLDEN / "runs"))
    assert all_runs(runs).note == ""
    monkeypatch.setattr("deltasam.lab.report._sections._MOST_ROWS", len(runs.runs.finished) - 3)
    assert "and 3 more;" in all_runs(runs).note
    assert len(all_runs(runs).frame) == len(runs.runs.finished) - 3
