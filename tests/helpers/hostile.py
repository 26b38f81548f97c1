"""Run folders whose names and texts try to break out of a page."""

from __future__ import annotations

import json
from pathlib import Path

HOSTILE = [
    "<script>document.title='broken'</script>",
    '"><img src=x onerror="document.title=\'broken\'">',
    "'; alert(1) //",
    "name-" + "very-long-" * 40,
    "🙂 emoji 👩‍👩‍👧",
    "\u202eright to left\u202c עברית",
    "</title></svg></td></table>&amp;&lt;",
]


def hostile_runs(source: Path, target: Path) -> None:
    """Copies run results, each with another hostile string as task, model or method; logs come along."""
    for number, path in enumerate(sorted(source.rglob("result.json"))):
        result = json.loads(path.read_text(encoding="utf-8"))
        field = ("task", "model", "method", "primary_metric", "device")[number % 5]
        text = HOSTILE[number % len(HOSTILE)]
        if field == "primary_metric":
            result["metrics"][text] = result["metrics"][result["primary_metric"]]
        result[field] = text
        place = target / f"run-{number}"
        place.mkdir(parents=True)
        (place / "result.json").write_text(json.dumps(result), encoding="utf-8")
        log = path.with_name("metrics.jsonl")
        if log.is_file():
            (place / "metrics.jsonl").write_text(log.read_text(encoding="utf-8"), encoding="utf-8")
