"""The report as text: complete, self-contained, and nothing in a run's names gets out of its place."""

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

from deltasam.lab.report import TABLES, _html_tables, html_report, read_runs
from deltasam.lab.report._colors import look
from deltasam.lab.report._html_tables import runs_table
from deltasam.lab.report._svg import Series, line_chart, map_chart
from helpers.hostile import HOSTILE, hostile_runs

GOLDEN = Path(__file__).parent / "golden"


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


def test_every_section_and_plot_is_there() -> None:
    text = page(GOLDEN / "runs")
    for section in ("summary", "results", "curves", "risk", "sharpness", "weights", "cost", "glue", "sts", "runs"):
        assert f'<section id="{section}">' in text
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    assert checker.seen.count("figure") == text.count("<figcaption>") > 20
    assert checker.seen.count("script") == 1


def test_no_word_of_the_page_is_cut_off_or_counted_wrong() -> None:
    text = page(GOLDEN / "runs")
    axes = set(re.findall(r'class="axis">([^<]*)<', text))
    assert "rise of the loss when perturbed" in axes
    assert not [words for words in axes if words.endswith("…")]
    assert "cpu, 1 thread)" in text
    assert "1 threads" not in text


def test_nothing_is_loaded_from_anywhere() -> None:
    text = page(GOLDEN / "runs")
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", text)
    assert "url(" not in text
    assert "@import" not in text
    assert len(text) < 1_000_000


def test_hostile_strings_are_shown_as_text(tmp_path: Path) -> None:
    hostile_runs(GOLDEN / "runs", tmp_path)
    text = page(tmp_path)
    checker = Checker()
    checker.feed(text)
    assert checker.seen.count("script") == 1
    assert "img" not in checker.seen
    for value in HOSTILE:
        assert value not in text.replace("&#x27;", "'") or "<" not in value
    assert "&lt;script&gt;" in text


def test_the_same_colour_for_a_method_everywhere() -> None:
    looks = [look(m) for m in ("ERM", "SAM", "DeltaSAM", "PerInstanceSAM", "ERM+RDrop", "ERM+R3F", "FreeLB")]
    assert len({one.color for one in looks}) == len(looks)
    assert look("GSAM") == look("GSAM")
    text = page(GOLDEN / "runs")
    assert text.count(look("DeltaSAM").color) > 10


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "deep/report.html"
    command = [sys.executable, "-m", "deltasam", "report"]
    subprocess.run([*command, str(GOLDEN / "runs"), "-o", str(out)], check=True, capture_output=True)
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    empty = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert empty.returncode == 2
    assert "no finished run" in empty.stderr


def test_an_empty_report_says_so(tmp_path: Path) -> None:
    assert "no finished run" in html_report(read_runs(tmp_path), [])


@pytest.mark.parametrize("value", [float("nan"), 1e300, 10**400], ids=["nan", "1e300", "400 digits"])
def test_odd_numbers_in_a_log_do_not_break_the_plots(tmp_path: Path, value: float) -> None:
    hostile_runs(GOLDEN / "runs", tmp_path)
    for log in tmp_path.rglob("metrics.jsonl"):
        lines = [json.dumps({"step": 1, "loss": value}), json.dumps({"step": 2, "loss": 0.5}), '{"step": 3, "lo']
        log.write_text("\n".join(lines))
    text = page(tmp_path)
    assert "nan," not in text


def page_with(tmp_path: Path, measurement: str, found: dict[str, Any]) -> str:
    """The page of one run with one measurement."""
    one = next(path.parent for path in sorted((GOLDEN / "runs").rglob("result.json")))
    shutil.copytree(one, tmp_path / "one", ignore=shutil.ignore_patterns("analysis"))
    (tmp_path / "one/analysis").mkdir()
    (tmp_path / f"one/analysis/{measurement}.json").write_text(json.dumps(found))
    return html_report(read_runs(tmp_path), [])


def landscape(tmp_path: Path, losses: list[float], plane: dict[str, Any]) -> str:
    lines = {"a line": {"x": list(range(len(losses))), "loss": losses}}
    return page_with(tmp_path, "landscape", {"lines": lines, "planes": {"a plane": plane}})


NOWHERE = [[math.nan, math.inf], [math.inf, math.nan]]


def test_losses_that_are_not_finite_are_left_out_of_the_landscape(tmp_path: Path) -> None:
    plane = {"x": [0.0, 1.0], "y": [0.0, 1.0]}
    partly = {**plane, "loss": [[0.1, math.nan], [0.2, 0.3]]}
    some = landscape(tmp_path / "some", [0.5, math.inf, math.nan, 0.7], partly)
    assert "Loss along a line" in some
    assert "Loss along a plane" in some
    across, _ = points(some.partition("Loss along a line")[2])
    assert len(across) == 2
    none = landscape(tmp_path / "none", [math.nan, math.inf], {**plane, "loss": NOWHERE})
    assert "Loss along" not in none
    assert "altered" not in none


@pytest.mark.parametrize(
    "plane",
    [
        {"x": [], "y": [], "loss": []},
        {"x": [0, 1, 2], "y": [0, 1], "loss": [[1, 2], [1, 2], [1, 2]]},
        {"x": [0, math.nan], "y": [0, 1], "loss": [[1, 2], [1, 2]]},
    ],
    ids=["empty", "turned", "nowhere"],
)
def test_a_plane_whose_rows_are_not_those_of_its_axes_is_altered(tmp_path: Path, plane: dict[str, Any]) -> None:
    assert "landscape.json is cut short or altered" in landscape(tmp_path, [0.5, 0.7], plane)


def points(svg: str) -> tuple[list[float], list[float]]:
    """Where the first line of a chart goes: from the left, and from the top."""
    pairs = [pair.split(",") for pair in re.findall(r'<polyline points="([^"]*)"', svg)[0].split()]
    return [float(across) for across, _ in pairs], [float(down) for _, down in pairs]


def test_larger_numbers_are_drawn_higher_and_no_tick_is_between_two_updates() -> None:
    drawn = line_chart([Series("SAM", look("SAM"), [1, 2], [0.1, 0.9])], title="", x="update", y="")
    across, down = points(drawn)
    assert across[0] < across[1]
    assert down[0] > down[1]
    assert re.findall(r'text-anchor="middle">([^<]+)<', drawn) == ["1", "2"]


def test_weights_are_drawn_from_the_lightest_to_the_heaviest_and_examples_listed(tmp_path: Path) -> None:
    examples = [{"weight": 2.0, "rank": 1, "text": "heavy <b>"}, {"weight": 0.125, "rank": 3, "text": "light"}]
    text = page_with(tmp_path, "instance-weights", {"weights": [0.125, 0.5, 2.0], "examples": examples})
    across, down = points(text.partition("Weights g at the end")[2])
    assert across == sorted(across)
    assert down == sorted(down, reverse=True)
    assert '<td class="example">heavy &lt;b&gt;</td><td data-value="2.0">2</td><td data-value="1">1</td>' in text
    assert '<td class="example">light</td><td data-value="0.125">0.125</td><td data-value="3">3</td>' in text


def test_rows_that_are_too_many_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = read_runs(GOLDEN / "runs").finished
    assert "more;" not in runs_table(runs)
    monkeypatch.setattr(_html_tables, "_MOST_ROWS", len(runs) - 3)
    assert "and 3 more;" in runs_table(runs)


def test_a_map_has_its_first_row_at_the_bottom_and_its_lowest_loss_darkest() -> None:
    drawn = map_chart([0.0, 1.0], [0.0, 1.0], [[1.0, 2.0], [3.0, 4.0]], title="", unit="loss")
    found = {
        title: (float(down), color)
        for down, color, title in re.findall(r'y="([\d.]+)" width[^>]*fill="([^"]+)"><title>([^<]+)<', drawn)
    }
    assert len(found) == 4
    assert found["(0, 0): 1"][0] == found["(1, 0): 2"][0] > found["(0, 1): 3"][0] == found["(1, 1): 4"][0]
    assert found["(0, 0): 1"][1] == "rgb(20,30,80)"
    assert found["(1, 1): 4"][1] == "rgb(250,240,160)"


@pytest.mark.parametrize(
    "line", ['{"step": 1, "loss": null}', '{"step": 1, "loss": "0.5"}', '{"loss": 0.5}', '{"step": "x"}']
)
def test_entries_of_a_log_that_make_no_sense_are_left_out(tmp_path: Path, line: str) -> None:
    shutil.copytree(GOLDEN / "runs", tmp_path, dirs_exist_ok=True)
    for log in tmp_path.rglob("metrics.jsonl"):
        log.write_text(f"{line}\n{log.read_text()}")
    assert page(tmp_path) == page(GOLDEN / "runs")
