"""The report in a real browser: no errors, nothing too wide, and sorting, switching and pointing work."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deltasam.lab.report import TABLES, html_report, read_runs
from helpers.hostile import HOSTILE, hostile_runs
from helpers.reports import write_measured_runs

pytestmark = pytest.mark.slow
GOLDEN = Path(__file__).parent / "golden"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Runs in the page after its own script, uses it as a reader would, and sends what it finds to the window around it.
PROBE = """
addEventListener("load", () => {
  const all = (where) => [...document.querySelectorAll(where)];
  const { clientWidth, scrollWidth } = document.documentElement;
  const seen = { clientWidth, scrollWidth };
  seen.drawn = all("figure svg").map((svg) => [svg.getBBox().width, svg.clientHeight]);
  seen.loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
  seen.title = document.title;
  seen.images = document.images.length;
  seen.text = document.body.textContent;
  const [plain] = all("#results table.dots");
  const means = () => [...plain.tBodies[0].rows].map((row) => row.cells[1].textContent);
  const button = plain.tHead.rows[0].cells[1].querySelector("button");
  seen.means = [means()];
  for (const direction of ["ascending", "descending"]) {
    button.click();
    seen.means.push(means());
    seen[direction] = plain.tHead.rows[0].cells[1].getAttribute("aria-sort");
  }
  const visible = (where) => all(where).filter((one) => one.checkVisibility());
  const shown = () => visible("#results .dots .axis").map((axis) => axis.textContent);
  seen.axes = [shown()];
  const views = all("#results .views button");
  if (views.length) views[1].click();
  seen.axes.push(shown());
  const [strip] = visible("#results .strip");
  if (strip) strip.dispatchEvent(new PointerEvent("pointerover", { bubbles: true, clientX: 390, clientY: 100 }));
  const tip = document.getElementById("tip");
  seen.tip = tip.hidden ? "" : tip.textContent;
  seen.tipRight = tip.getBoundingClientRect().right;
  parent.postMessage(JSON.stringify(seen), "*");
});
"""
FRAME = """<!doctype html><body style="margin: 0"><pre id="seen"></pre>
<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{page}"></iframe>
<script>
addEventListener("message", (event) => {{ document.getElementById("seen").textContent = event.data; }});
</script>
"""


class Seen(NamedTuple):
    """What a browser has shown and logged."""

    page: dict[str, Any]
    console: list[str]


def browse(runs: Path, width: int, folder: Path) -> Seen:
    """Opens the page of a folder of runs in a frame: a window has a smallest width, a frame does not."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    found = read_runs(runs)
    page = html_report(found, [make(found) for make in TABLES.values()], title="Test")
    page = page.replace("</body>", f"<script>{PROBE}</script></body>")
    (folder / "frame.html").write_text(FRAME.format(width=width, page=html.escape(page)), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    options += [
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width + 100},1000",
        "--virtual-time-budget=5000",
    ]
    command = [CHROMIUM, *options, "--dump-dom", (folder / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert seen is not None
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert seen[1], f"the page sent nothing: {console}"
    return Seen(json.loads(html.unescape(seen[1])), console)


@pytest.mark.parametrize("width", [1280, 400])
def test_a_reader_can_use_the_page(tmp_path: Path, width: int) -> None:
    write_measured_runs(tmp_path / "runs")
    seen, console = browse(tmp_path / "runs", width, tmp_path)
    assert console == []
    assert seen["loaded"] == []
    assert seen["scrollWidth"] <= seen["clientWidth"] == width
    assert len(seen["drawn"]) > 5
    assert all(drawn > 100 and height > 20 for drawn, height in seen["drawn"])
    before, rising, falling = seen["means"]
    assert rising == sorted(before, key=float)
    assert falling == rising[::-1] != rising
    assert (seen["ascending"], seen["descending"]) == ("ascending", "descending")
    scores, differences = seen["axes"]
    assert len(scores) == len(differences) == 1
    assert scores != differences
    assert "pairs" in seen["tip"]
    assert seen["tipRight"] <= width


@pytest.mark.parametrize("width", [1280, 400])
def test_hostile_strings_are_text_and_fit(tmp_path: Path, width: int) -> None:
    hostile_runs(GOLDEN / "runs", tmp_path / "runs")
    seen, console = browse(tmp_path / "runs", width, tmp_path)
    assert console == []
    assert seen["title"] == "Test"
    assert seen["images"] == 0
    assert seen["scrollWidth"] <= seen["clientWidth"] == width
    for text in HOSTILE:
        assert text in seen["text"]
