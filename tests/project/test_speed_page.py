"""The page on speed says what the committed measurements say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "speed_page.py"))


def test_the_page_is_made_from_the_results(script: dict[str, Any]) -> None:
    assert script["PAGE"].read_text() == script["page"](), "run: python benchmarks/speed_page.py"
    drawn = {name: (script["PLOTS"] / name).read_text() for name in script["plots"]()}
    assert drawn == script["plots"](), "run: python benchmarks/speed_page.py"


def row(name: str, *seconds: float, peak: int | None = None) -> dict[str, Any]:
    spread = {"median": seconds[0], "low": seconds[0], "high": seconds[0]}
    return {
        "name": name, "seconds": spread, "times_erm": spread, "times_sam": spread, "forwards": 2.0, "backwards": 2.0,
        "peak_bytes": peak, "memory_times_sam": peak, "rounds": list(seconds),
    }  # fmt: skip


def measurement(folder: Path, part: str, *rows: dict[str, Any], **changes: Any) -> None:
    options = {"model": "bert-base", "batch": 16, "length": 64, "precision": "bf16", "rounds": 2, **changes}
    record = {
        "part": part,
        "command": f"python benchmarks/speed.py --part {part}",
        "options": options,
        "rows": rows,
        "failures": {},
        "machine": {
            "device": "a GPU", "threads": "1", "torch": "2", "commit": "abc", "parameters": str(10**8),
            "parameter_bytes": "100",
        },
        "engine": {"low-rank": 70, "materialised": 4},
    }  # fmt: skip
    (folder / part).mkdir(parents=True, exist_ok=True)
    name = f"{options['model']}-{options['batch']}x{options['length']}-{options['precision']}.json"
    (folder / part / name).write_text(json.dumps(record))


def test_ratios_of_rounds_beside_their_targets(script: dict[str, Any], tmp_path: Path) -> None:
    sam, instances = row("SAM captured", 2.0, 20.0, peak=100), row("PerInstanceSAM captured", 2.4, 24.0, peak=200)
    measurement(tmp_path, "figures", row("ERM captured", 1.0, 10.0), sam, instances, batch=32, length=128)
    page = script["page"](tmp_path)
    assert "captured SAM / (2 x captured ERM) | <= 1.03 | 1.00 ±0.00 ✓ | <= 1.03 | - |" in page
    assert "captured exact per-instance / captured SAM | <= 1.12 | 1.20 ±0.00 ✗ |" in page
    assert "captured, everything | <= 1.4 | 1.25 ✓ |" in page  # (200 + 3 x 100) / (100 + 3 x 100)
    assert "captured, beyond weights and optimizer | <= 1.4 | 2.00 ✗ |" in page
    assert 'per-instance with `factors="exact"`' not in page  # not measured, not told
    assert "commit abc" in page
    assert "python benchmarks/speed.py --part figures" in page


def memory_of(page: str, name: str) -> list[str]:
    """The cells beside the eager peak memory of one kind of per-instance step."""
    lines = [line for line in page.splitlines() if f"peak memory {name} / SAM, eager, beyond" in line]
    return [cell.strip() for line in lines for cell in line.split("|")[2:-1]]


def test_exact_factors_stand_beside_the_default(script: dict[str, Any], tmp_path: Path) -> None:
    rows = row("ERM", 1.0), row("SAM", 2.0, peak=100), row("PerInstanceSAM", 2.4, peak=130)
    shape = {"batch": 32, "length": 128}
    measurement(tmp_path, "figures", *rows, **shape)
    measurement(tmp_path, "figures", *rows, row("PerInstanceSAM-exact", 2.4, peak=150), **shape, precision="tf32")
    page = script["page"](tmp_path)
    assert memory_of(page, "per-instance") == ["<= 1.4", "1.30 ✓", "<= 1.4", "1.30 ✓"]
    assert memory_of(page, 'per-instance with `factors="exact"`') == ["<= 1.4", "-", "<= 1.4", "1.50 ✗"]
    assert "`PerInstanceSAM` keeps the output gradients of layers that widen in bfloat16 by default" in page


def test_growth_has_a_table_and_a_plot_for_every_axis(script: dict[str, Any], tmp_path: Path) -> None:
    for length, times in ((64, 1.0), (512, 3.0)):
        rows = (row("SAM captured", times), row("PerInstanceSAM captured", 1.5 * times), row("SAM", 9.0))
        measurement(tmp_path, "growth", *rows, length=length)
    page, plots = script["page"](tmp_path), script["plots"](tmp_path)
    assert "| 512 | 3000.0 | - | 1.50 | - | - | - | 70 + 4 |" in page
    assert list(plots) == ["tokens.svg"]  # the other axes have one point each
    assert plots["tokens.svg"].count("<polyline") == 3
    assert "prefers-color-scheme:dark" in plots["tokens.svg"]


def test_what_failed_is_on_the_page_and_what_is_missing_is_not(script: dict[str, Any], tmp_path: Path) -> None:
    assert "## The figures" not in script["page"](tmp_path)
    measurement(tmp_path, "loop", row("SAM", 1.0), row("PerInstanceSAM", 2.0), row("PerInstanceSAM-loop", 30.0))
    failed = {"part": "figures", "options": {"model": "big", "batch": 1, "length": 2, "precision": "bf16"}}
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "big.json").write_text(json.dumps({**failed, "failed": "OutOfMemoryError: much"}))
    page = script["page"](tmp_path)
    assert "| bert-base, 16 x 64, bf16 | 30000.0 | 2000.0 | - | 1000.0 | 15.00 | - | 30.00 |" in page
    assert "- figures: big, 1 x 2, bf16: OutOfMemoryError: much" in page
    assert "## The figures" not in page


def test_end_to_end_against_half_of_eager_sam(script: dict[str, Any], tmp_path: Path) -> None:
    def training(name: str, seconds: float, times: float | None) -> dict[str, Any]:
        method, _, way = name.partition(" ")
        run = {"seconds_per_update": 0.01, "forwards": 4, "backwards": 2}
        ratio = None if times is None else {"median": times}
        return {
            "name": name, "method": method, "way": way or "eager", "seconds": {"median": seconds},
            "times_sam": ratio, "times_erm": None, "runs": [run],
        }  # fmt: skip

    options = {"task": "mrpc", "model": "m", "epochs": 3.0, "steps": None, "precision": "fp32", "batch": 32}
    rows = [
        training("sam", 10.0, 1.0),
        training("delta-sam captured", 5.04, 0.504),
        training("sam captured", 3.0, 0.3),
    ]
    record = {"part": "train", "options": options, "rows": rows}
    (tmp_path / "train").mkdir()
    facts = {"device": "a GPU", "torch": "2", "commit": "abc"}
    (tmp_path / "train" / "mrpc.json").write_text(json.dumps({**record, "machine": facts}))
    page = script["page"](tmp_path)
    assert "| delta-sam captured | 5.0 | 0.50 ✓ | - | 10.0 | 4/2 |" in page
    assert "| sam captured | 3.0 | 0.30 | - |" in page


def test_the_engine_on_a_cpu_beside_its_target(script: dict[str, Any], tmp_path: Path) -> None:
    ours, slow = row("PerInstanceSAM", 2.2, 22.0), row("PerInstanceSAM-loop", 22.0, 220.0)
    shape = {"model": "bert-4x256", "precision": "fp32"}
    measurement(tmp_path, "cpu", row("ERM", 1.0, 10.0), row("SAM", 2.0, 20.0), ours, slow, **shape)
    assert "| 2000.0 | 2200.0 | 22000.0 | 1.10 ±0.00 ✓ | <= 1.25 | 10.00 |" in script["page"](tmp_path)
