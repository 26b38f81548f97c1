"""The page of results, and the tables, say what the committed runs say."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

from deltasam.report import TABLES, read_runs, to_markdown

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_results() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "results_page.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run: python benchmarks/results_page.py"


def test_the_tables_read_the_committed_runs() -> None:
    for name, folder, value in (("adversarial-risk", "adversarial-risk", "2.47"), ("glue", "glue", "81.9")):
        runs = read_runs(ROOT / "results" / folder)
        assert runs.finished
        assert not runs.problems()
        assert value in to_markdown(TABLES[name](runs))


def test_weights_were_measured_on_committed_runs() -> None:
    folder = ROOT / "results" / "weights"
    steps = {run.path.name: run.steps for run in read_runs(folder).finished}
    files = sorted(folder.glob("*.json"))
    assert {int(path.stem.rpartition("-")[2]) for path in files} == set(steps.values())
    for path in files:
        for line in json.loads(path.read_text(encoding="utf-8")):
            assert steps[line["run"]] == int(path.stem.rpartition("-")[2])
            sizes = {len(values) for values in line["by_batch"].values()}
            assert sizes == {6}, "the page says how many batches"


def test_signal_over_noise_is_a_geometric_mean() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "results_weights.py"))
    assert script["geometric"]([0.1, 10.0]).startswith("1 [")
    found = {5: {("SAM",): {"regulariser": [0.5, 0.7]}}, 9: {}}
    ((name, at_five, at_nine),) = script["over_points"](found, "regulariser", script["two_digits"])
    assert (name, at_nine) == ("SAM", "-")
    assert at_five.startswith("0.60 [")


def test_results_hold_no_weights() -> None:
    kinds = {path.suffix for path in (ROOT / "results").rglob("*") if path.is_file()}
    assert kinds <= {".json", ".md", ".jsonl"}


def test_figures_of_the_readme_are_on_the_pages() -> None:
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("results", "speed")}
    measured = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Measured")[2].partition("\n## ")[0]
    speed, _, risk = measured.partition("**Does it help?**")
    shown = re.findall(r"\d+\.\d+ \[[^]]+\]", risk)
    assert len(shown) == 8
    assert [cell for cell in shown if cell not in pages["results"]] == []
    of_base = pages["speed"].partition("### roberta-large")[0]
    for name, *cells in (row.strip("| ").split(" | ") for row in speed.splitlines() if row.startswith("| captured")):
        rows = re.findall(rf"^\| {re.escape(name)} \| (.*)$", of_base, flags=re.M)
        found = [number for row in rows for number in re.findall(r"(\d\.\d\d) ±", row)]
        assert cells == found, name
