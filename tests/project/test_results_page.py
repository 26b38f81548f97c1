"""The page of results, and the tables, say what the committed runs say."""

from __future__ import annotations

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


def test_results_hold_no_weights_and_no_places_of_a_machine() -> None:
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".md", ".jsonl"}
    assert not [path for path in files if any(word in path.read_text() for word in ("/tmp/", "/root/", "/home/"))]
