"""Ten thousand run folders: seconds, and little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deltasam.lab.report import read_runs

GOLDEN = Path(__file__).parent / "golden"
COUNT = 10_000
# In a separate process, to measure only its memory and time.
MEASURE = """
import resource, sys
from deltasam.lab.cli import main
main(["table", "glue", sys.argv[1], "--format", "csv"])
used = resource.getrusage(resource.RUSAGE_SELF)
assert "torch" not in sys.modules
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, file=sys.stderr)
"""


@pytest.mark.slow
def test_ten_thousand_run_folders_in_five_seconds_and_a_gigabyte(tmp_path: Path) -> None:
    texts = [path.read_text() for path in sorted((GOLDEN / "runs").rglob("result.json"))]
    results = [json.loads(text) for text in texts]
    glue = [result for result in results if result["task"] in ("mrpc", "rte")]
    for number in range(COUNT):
        result = dict(glue[number % len(glue)])
        result["seed"], result["run_id"] = number, f"{number:012x}"
        place = tmp_path / f"sweep-{number % 7}" / f"run-{number}"
        place.mkdir(parents=True)
        (place / "result.json").write_text(json.dumps(result, indent=2))
        (place / "config.yaml").write_text("seed: 1")
        (place / "metrics.jsonl").write_text("{}")
    (tmp_path / "sweep-6/failures").mkdir()
    (tmp_path / "sweep-6/failures/lost.txt").write_text("Traceback")
    assert [path.name for path in read_runs(tmp_path).failed] == ["lost.txt"]
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, done.stderr.split())
    print(f"{COUNT} run folders: {seconds:.2f} s of processor time, {megabytes:.0f} MB")
    counted = [int(line.split(",")[6]) for line in done.stdout.splitlines()[1:] if line.startswith("glue,BERT-base")]
    assert max(counted) > 100
    assert seconds < 5
    assert megabytes < 1024
