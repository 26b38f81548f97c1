"""The page of results, and the tables, say what the committed runs say."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltasam.lab.report import TABLES, read_runs, to_markdown

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


def test_the_plots_are_made_from_the_results() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "results_page.py"))
    drawn = {path.name: path.read_text(encoding="utf-8") for path in script["PLOTS"].glob("*.svg")}
    assert drawn == script["plots"](), "run: python benchmarks/results_page.py"
    assert all(f"(_static/results/{name})" in script["PAGE"].read_text(encoding="utf-8") for name in drawn)


def record(method: str, updates: int, cosines: dict[str, list[float]]) -> dict[str, Any]:
    """A file of benchmarks/weights_run.py on so many batches as there are cosines."""
    count = len(cosines["SAM"])
    ranks: list[Any] = [None, *[0.5] * (count - 1)]
    weights = [
        {
            "weighting": name,
            "condition": condition,
            "by_batch": dict.fromkeys(("spearman", "snr", "ideal", "median"), ranks),
        }
        for name in ("FiniteDifference", "FiniteDifference(radius=2.0)")
        for condition in ("float64", "float32", "another direction")
    ]
    updates_of = [
        {"method": name, "by_batch": {"regulariser": values, "update": values}} for name, values in cosines.items()
    ]
    measurements = {"weights": {"lines": weights}, "alignment": {"lines": updates_of}}
    about = {
        "rows": 4 * count,
        "batch_size": 4,
        "device": "Abacus",
        "torch": "2",
        "commit": "abc",
        "command": "run me",
    }
    return {"method": method, "updates": updates, "value": 0.75, "measurements": measurements, **about}


def test_newer_measurements_of_the_weights_take_the_place_of_older_ones(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "results_weights.py"))
    assert script["weights_section"](tmp_path) == ""
    sam = [0.1 * (n % 7) for n in range(16)]
    more = {name: [value + 0.2 for value in sam] for name in ("DeltaSAM FiniteDifference", "DeltaSAM OwnGradient")}
    cosines = {"SAM": sam, "DeltaSAM RandomWeights": sam, **more}
    folder = tmp_path / "instance-weights"
    folder.mkdir()
    for label, method, updates in (("sam", "SAM", 9), ("late", "ERM", 9), ("early", "ERM", 3)):
        (folder / f"{label}.json").write_text(json.dumps(record(method, updates, cosines)))
    text = script["weights_section"](tmp_path)
    assert "| estimator | changed | 3 updates | 9 updates | SAM, 9 updates |" in text
    assert "2 points of one path, and SAM (rho = 0.05) after 9" in text
    assert "64 training rows, a fixed random sample, in 16 batches of 4" in text
    assert "| Eq. 5, probes of norm 2 | float32 | 0.50 [0.50, 0.50] (15 of 16 batches) |" in text
    assert "    run me" in text
    smallest = f"{2 / 2**16 * 15:.2g}"  # of 5 differences at 3 models, of which 9 are as clear as can be
    assert f"| δ-SAM, Eq. 5 - SAM | 0.20 [0.20, 0.20] (p = {smallest}) |" in text
    assert "after Holm's correction" in text
    drawn = script["plot"](tmp_path)
    assert drawn.count("<title>Eq. 5, probes of norm 2, SAM 9: 0.50 [0.50, 0.50]</title>") == 2


def test_signal_over_noise_is_a_geometric_mean() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "results_weights.py"))
    assert script["geometric"]([0.1, 10.0]).startswith("1 [")
    found = {5: {("SAM",): {"regulariser": [0.5, 0.7]}}, 9: {}}
    ((name, at_five, at_nine),) = script["over_points"](found, "regulariser", script["two_digits"])
    assert (name, at_nine) == ("SAM", "-")
    assert at_five.startswith("0.60 [")


@pytest.mark.parametrize("name", ["results", "speed"])
def test_rows_of_a_table_are_as_long_as_its_head(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    tables = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    assert len(tables) > 3
    for head, *rows in tables:
        assert {row.count("|") for row in rows} == {head.count("|")}, head


def test_results_hold_no_weights() -> None:
    kinds = {path.suffix for path in (ROOT / "results").rglob("*") if path.is_file()}
    assert kinds <= {".json", ".md", ".jsonl"}


def test_figures_of_the_readme_are_on_the_pages() -> None:
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("results", "speed")}
    measured = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Measured")[2].partition("\n## ")[0]
    speed, _, scores = measured.partition("**Does it help?**")
    shown = re.findall(r"\d+\.\d+ \[[^]]+\]", scores)
    assert len(shown) == 36
    assert [cell for cell in shown if cell not in pages["results"]] == []
    of_base = pages["speed"].partition("### roberta-large")[0]
    for name, *cells in (row.strip("| ").split(" | ") for row in speed.splitlines() if row.startswith("| captured")):
        rows = re.findall(rf"^\| {re.escape(name)} \| (.*)$", of_base, flags=re.M)
        found = [number for row in rows for number in re.findall(r"(\d\.\d\d) ±", row)]
        assert cells == found, name


def test_runs_that_two_folders_share_are_the_same() -> None:
    """The runs of glue-eta at eta = 1e-4 are copies of those in glue."""
    own, others = (ROOT / "results" / name for name in ("glue-eta", "glue"))
    shared = sorted({path.name for path in own.iterdir()} & {path.name for path in others.iterdir()})
    assert len(shared) == 54
    for name in shared:
        assert (own / name / "result.json").read_bytes() == (others / name / "result.json").read_bytes()


def test_intervals_hold_the_mean_as_often_as_the_page_says() -> None:
    """Counted again, with fewer draws: 400 of them are within 0.055 of the share (three standard errors)."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "interval_coverage.py"))
    said = json.loads(script["FILE"].read_text(encoding="utf-8"))
    random = np.random.default_rng(1)
    assert script["of_a_cell"](5, 400, random) == pytest.approx(said["cell"]["5"], abs=0.055)
    assert script["of_several_tasks"](4, 5, 400, random) == pytest.approx(said["tasks"]["4"]["5"], abs=0.055)
