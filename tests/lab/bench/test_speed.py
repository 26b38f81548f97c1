"""``benchmarks/speed.py``: many measurements in one process; one may fail."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from helpers.data import REPOSITORY

TINY = ["--models", "bert-tiny", "--sizes", "2x4", "--precisions", "fp32", "--device", "cpu", "--rounds", "1"]


@pytest.fixture(scope="module")
def speed() -> dict[str, Any]:
    pytest.importorskip("transformers")
    return runpy.run_path(str(REPOSITORY / "benchmarks" / "speed.py"), run_name="speed")


def test_one_line_and_one_file_for_each(
    speed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speed["main"](["--part", "loop", *TINY, "--out", str(tmp_path)])
    stored = json.loads((tmp_path / "loop" / "bert-tiny-2x4-fp32.json").read_text())
    assert stored["part"] == "loop"
    assert "--part loop --models bert-tiny" in stored["command"]
    assert str(tmp_path) not in json.dumps(stored)
    names = [row["name"] for row in stored["rows"]]
    assert "PerInstanceSAM-loop" in names
    assert "PerInstanceSAM-loop captured" not in names
    passes = {row["name"]: row["forwards"] for row in stored["rows"]}
    assert (passes["PerInstanceSAM"], passes["PerInstanceSAM-loop"]) == (2, 3)  # one per instance, and l(w)
    assert capsys.readouterr().out.startswith("loop bert-tiny-2x4-fp32 (")


def test_a_measurement_that_fails_is_recorded_and_the_rest_continues(
    speed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deltasam.lab.bench import _measure

    real = _measure.measure

    def out_of_memory_once(options: Any, entries: Any, **others: Any) -> Any:
        if options.batch == 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate\na lot")
        return real(options, entries, **others)

    monkeypatch.setattr(_measure, "measure", out_of_memory_once)
    speed["main"](["--part", "adamw", *TINY, "--sizes", "3x4", "2x4", "--out", str(tmp_path)])
    failed, made = (json.loads((tmp_path / "adamw" / f"bert-tiny-{n}x4-fp32.json").read_text()) for n in (3, 2))
    assert failed["failed"] == "RuntimeError: CUDA out of memory. Tried to allocate"
    assert len(made["rows"]) == 6
    assert "failed: RuntimeError: CUDA out of memory" in capsys.readouterr().out


def test_time_runs_out_and_existing_measurements_are_not_repeated(
    speed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speed["main"](["--part", "figures", *TINY, "--seconds", "-1", "--out", str(tmp_path)])
    assert capsys.readouterr().out == "figures bert-tiny-2x4-fp32: skipped, out of time\n"
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "bert-tiny-2x4-fp32.json").write_text("{}")
    speed["main"](["--part", "figures", *TINY, "--missing", "--out", str(tmp_path)])
    assert capsys.readouterr().out == ""


def test_the_grid_of_the_figures_and_the_axes_of_growth(speed: dict[str, Any]) -> None:
    request = speed["BenchRequest"]()
    plans = {part: list(speed["PARTS"][part](request)) for part in ("figures", "growth")}
    shapes = [(one.model, one.batch, one.length, one.precision, one.memory) for one in plans["figures"]]
    assert len(shapes) == len(set(shapes)) == 8
    assert [memory for *_, memory in shapes] == [size == 32 for _, size, *_ in shapes]
    grown = [(one.model, one.batch, one.length) for one in plans["growth"]]
    assert len(grown) == len(set(grown)) == 14
    assert {n for model, n, t in grown if (model, t) == ("bert-base", 64)} == {8, 16, 32, 64, 128}
    assert {t for model, n, t in grown if (model, n) == ("bert-base", 16)} == {32, 64, 128, 256, 512}
    assert len({model for model, *_ in grown}) == 6


def test_the_scripts_use_public_names_only() -> None:
    private = re.compile(r"(?:from|import) deltasam[\w.]*\._|from deltasam[\w.]* import _")
    found = {path.name: private.findall(path.read_text()) for path in (REPOSITORY / "benchmarks").glob("*.py")}
    assert not any(found.values()), found


def test_names_of_the_bench_are_there_on_first_use() -> None:
    code = (
        "import sys, deltasam.lab.bench as b; assert 'torch' not in sys.modules; print(sorted(b.__all__), b.measure)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("['Candidate', 'candidates', 'measure', 'prepared'] <function measure"), done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'mesure'; it has Candidate, "):
        import_module("deltasam.lab.bench").mesure  # noqa: B018


def test_measurements_get_ready_side_by_side_and_take_turns(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "speed.py"), "--part", "adamw", *TINY]
    command += ["--sizes", "2x4", "3x4", "--side-by-side", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.stdout.count("adamw bert-tiny-") == 2, done.stderr
    for n in (2, 3):
        stored = json.loads((tmp_path / "adamw" / f"bert-tiny-{n}x4-fp32.json").read_text())
        assert stored["command"].endswith("--sizes 2x4 3x4 --side-by-side")


def test_no_measurement_starts_before_the_last_is_ready(speed: dict[str, Any], tmp_path: Path) -> None:
    turns = speed["Turns"]
    entered: list[str] = []
    inside = threading.Semaphore(1)

    def take(name: str) -> None:
        with turns(tmp_path, 3, name).alone():
            entered.append(name if inside.acquire(blocking=False) else f"{name} was not alone")
            time.sleep(0.05)  # the other could enter now
            inside.release()

    threads = [threading.Thread(target=take, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    while len(list(tmp_path.glob("*.ready"))) < 2:
        time.sleep(0.01)
    time.sleep(0.3)  # those that do not wait would go on
    assert not entered
    turns(tmp_path, 3, "c").arrive()
    for thread in threads:
        thread.join()
    assert sorted(entered) == ["a", "b"]


def test_no_process_waits_for_one_that_was_killed(speed: dict[str, Any], tmp_path: Path) -> None:
    """Three processes: one dies before it is ready, the other two take their turns."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, runpy, sys\nfrom pathlib import Path\n"
        f"Turns = runpy.run_path({str(REPOSITORY / 'benchmarks' / 'speed.py')!r}, run_name='speed')['Turns']\n"
        "word, _, folder, number, name = sys.argv[1:]\n"
        "if word == 'dies':\n    os.kill(os.getpid(), 9)\n"
        "with Turns(Path(folder), int(number), name).alone():\n    Path(__file__).with_name(name).touch()\n"
    )
    thread = threading.Thread(target=speed["side_by_side"], args=(str(script), [["dies"], ["works"], ["works"]]))
    thread.start()
    thread.join(600)  # three starts of Python take seconds, even on a busy machine
    assert not thread.is_alive()
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "1", "2"}
