"""The report in a real browser: `make test-browser`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.report import TABLES, html_report, read_runs
from helpers.hostile import HOSTILE, hostile_runs

pytestmark = pytest.mark.browser
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(GOLDEN / "runs", tmp_path_factory.mktemp("report") / "report.html")


def write(folder: Path, path: Path) -> Path:
    runs = read_runs(folder)
    page = html_report(runs, [make(runs) for make in TABLES.values()], title="Test")
    path.write_text(page, encoding="utf-8")
    return path


def open_page(browser: Any, path: Path, width: int = 1280) -> None:
    browser.set_window_size(width, 900)
    browser.get_log("browser"), browser.get_log("performance")  # forget the last page
    browser.get(path.as_uri())


def column(browser: Any, number: int) -> list[str]:
    script = "return [...document.querySelectorAll('#results tbody tr')].map(r => r.cells[arguments[0]].textContent)"
    return browser.execute_script(script, number)


def test_opens_without_errors_and_loads_nothing(browser: Any, report: Path) -> None:
    open_page(browser, report)
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert {url for url in asked if not url.startswith("data:")} == {report.as_uri()}


def test_every_plot_is_drawn(browser: Any, report: Path) -> None:
    open_page(browser, report)
    figures = browser.find_elements("css selector", "figure svg")
    assert len(figures) == report.read_text(encoding="utf-8").count("<figure>")
    script = "return [...document.querySelectorAll('figure svg')].map(s => [s.getBBox().width, s.clientHeight])"
    assert all(width > 100 and height > 20 for width, height in browser.execute_script(script))


def test_sorting_works_both_ways_and_from_the_keyboard(browser: Any, report: Path) -> None:
    open_page(browser, report)
    heads = browser.find_elements("css selector", "#results thead th")
    mean = [head.text.split()[0] for head in heads].index("mean")
    before = column(browser, mean)
    button = heads[mean].find_element("tag name", "button")
    browser.execute_script("arguments[0].click()", button)

    def number(text: str) -> float:
        return float(text.removesuffix("★"))

    assert column(browser, mean) == sorted(before, key=number)
    assert heads[mean].get_attribute("aria-sort") == "ascending"
    button.send_keys("\ue007")  # Enter
    assert column(browser, mean) == sorted(before, key=number, reverse=True)
    risk = [head.text.split()[0] for head in heads].index("adversarial")
    browser.execute_script("arguments[0].click()", heads[risk].find_element("tag name", "button"))
    values = column(browser, risk)
    numbers = [float(value) for value in values if value != "not measured"]
    assert numbers == sorted(numbers)
    assert values[len(numbers) :] == ["not measured"] * (len(values) - len(numbers))


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_screen(browser: Any, report: Path, tmp_path: Path, width: int) -> None:
    hostile_runs(GOLDEN / "runs", tmp_path)
    for path in (report, write(tmp_path, tmp_path / "hostile.html")):
        # A window has a smallest width, a device does not.
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        open_page(browser, path)
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        try:
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        finally:
            browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_hostile_strings_are_text(browser: Any, tmp_path: Path) -> None:
    hostile_runs(GOLDEN / "runs", tmp_path)
    open_page(browser, write(tmp_path, tmp_path / "report.html"))
    assert browser.title == "Test"
    assert browser.get_log("browser") == []
    shown = browser.execute_script("return document.body.textContent")
    for text in HOSTILE:
        assert text in shown
    assert browser.execute_script("return document.images.length") == 0
