"""The page on speed says what the committed measurements say."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_results() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "speed_page.py"))
    assert script["PAGE"].read_text() == script["page"](), "run: python benchmarks/speed_page.py"
