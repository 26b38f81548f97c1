"""The section of docs/results.md on its own intervals: how often they hold what they should."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

table = runpy.run_path(str(Path(__file__).with_name("results_common.py")))["table"]

ABOUT = """Few seeds make bootstrap intervals too narrow. This is how often those of this page, which say 95%, hold the
true mean where the scores are drawn from a normal distribution ({repetitions:,} draws): those of a cell (BCa), and
those of the mean over several tasks.

    python benchmarks/interval_coverage.py"""


def intervals_section(results: Path) -> str:
    """A row for every number of seeds; nothing where it was not counted."""
    file = results / "interval-coverage" / "normal.json"
    if not file.exists():
        return ""
    found = json.loads(file.read_text(encoding="utf-8"))
    columns = {"a cell": found["cell"], **{f"over {tasks} tasks": at for tasks, at in found["tasks"].items()}}
    rows = [[seeds, *(f"{100 * at[seeds]:.0f}%" for at in columns.values())] for seeds in found["cell"]]
    return "\n\n".join([
        "## How far to trust the intervals",
        ABOUT.format(repetitions=found["repetitions"]),
        table(["seeds", *columns], rows),
    ])  # fmt: skip
