"""``benchmarks/speed.py``: many measurements in one process; one may fail."""

from __future__ import annotations

import copy
import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasam import SAM, Classification
from helpers.data import REPOSITORY

TINY = ["--models", "bert-tiny", "--sizes", "2x4", "--precisions", "fp32", "--device", "cpu", "--rounds", "1"]


@pytest.fixture(scope="module")
def speed() -> Iterator[dict[str, Any]]:
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        yield runpy.run_path(str(REPOSITORY / "benchmarks" / "speed.py"), run_name="speed")


@pytest.mark.filterwarnings("ignore:.*the loop over instances passes the whole batch")
def test_one_line_and_one_file_for_each(
    speed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speed["main"](["--part", "loop", *TINY, "--out", str(tmp_path)])
    stored = json.loads((tmp_path / "loop" / "bert-tiny-2x4-fp32.json").read_text())
    assert stored["part"] == "loop"
    assert "--part loop --models bert-tiny" in stored["command"]
    assert str(tmp_path) not in json.dumps(stored)
    measured = [row["name"] for row in stored["rows"]]
    assert "PerInstanceSAM-loop" in measured
    assert "PerInstanceSAM-loop captured" not in measured
    passes = {row["name"]: row["forwards"] for row in stored["rows"]}
    assert (passes["PerInstanceSAM"], passes["PerInstanceSAM-loop"]) == (2, 5)  # two per instance, and l(w)
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
    speed["main"](["--part", "figures", *TINY, "--budget", "-1", "--out", str(tmp_path)])
    assert capsys.readouterr().out == "figures bert-tiny-2x4-fp32: skipped, out of time\n"
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "bert-tiny-2x4-fp32.json").write_text("{}")
    speed["main"](["--part", "figures", *TINY, "--missing", "--out", str(tmp_path)])
    assert capsys.readouterr().out == ""


def planned(speed: dict[str, Any], part: str) -> list[tuple[str, str, str]]:
    """Model, size and precision of the measurements of a part."""
    options = speed["PARTS"][part](speed["BenchRequest"]())
    return [(one.model, f"{one.batch}x{one.length}", one.precision) for one in options]


def test_the_shapes_of_the_parts(speed: dict[str, Any]) -> None:
    grid = {("bert-base", size, precision) for size in ("16x64", "32x128") for precision in ("bf16", "tf32")}
    for part in ("eager", "figures", "compiled"):
        assert set(planned(speed, part)) == grid
        assert len(planned(speed, part)) == len(grid)
    memory = {one.batch: one.memory for one in speed["PARTS"]["figures"](speed["BenchRequest"]())}
    assert memory == {16: False, 32: True}
    assert {size for _, size, _ in planned(speed, "long")} == {"8x512", "4x1024"}


def test_the_axes_of_growth(speed: dict[str, Any]) -> None:
    grown = [(model, *map(int, size.split("x"))) for model, size, _ in planned(speed, "growth")]
    assert len(grown) == len(set(grown))
    assert {n for model, n, t in grown if (model, t) == ("bert-base", 64)} == {8, 16, 32, 64, 128}
    assert {t for model, n, t in grown if (model, n) == ("bert-base", 16)} == {32, 64, 128, 256, 512, 1024}
    assert {"bert-1b", "roberta-large", "bert-base"} < {model for model, n, t in grown if (n, t) == (16, 64)}


def names(speed: dict[str, Any], part: str) -> list[str]:
    """The steps of the first measurement of a part."""
    options = next(iter(speed["PARTS"][part](speed["BenchRequest"]())))
    return [each.name for each in speed["candidates_of"](part, options)]


def test_the_steps_of_the_parts_that_leave_some_out(speed: dict[str, Any]) -> None:
    compiled = names(speed, "compiled")
    assert {f"{step} compiled" for step in ("ERM", "SAM", "DeltaSAM-ambient", "PerInstanceSAM")} < set(compiled)
    assert [name for name in compiled if name.endswith(" captured")] == ["SAM captured"]
    assert "PerInstanceSAM compiled+captured" in compiled
    peers = ["pytorch_optimizer.SAM", "SAM of davda54's kind"]
    assert names(speed, "peers") == ["ERM", "SAM", "SAM captured", *peers]
    assert names(speed, "mlp") == ["ERM", "SAM", *peers]


def test_a_package_that_is_missing_is_recorded(
    speed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    speed["main"](["--part", "mlp", "--device", "cpu", "--rounds", "1", "--out", str(tmp_path)])
    (stored,) = (json.loads(path.read_text()) for path in (tmp_path / "mlp").iterdir())
    assert list(stored["failures"]) == ["pytorch_optimizer.SAM"]
    passes = {row["name"]: (row["forwards"], row["backwards"]) for row in stored["rows"]}
    assert passes["SAM of davda54's kind"] == passes["SAM"] == (2, 2)


def test_sam_of_davda54s_kind_computes_sam(speed: dict[str, Any]) -> None:
    """The same weights as ours after a step of SGD, and at other addresses."""
    peers = import_module("speed_peers")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    theirs, batch = copy.deepcopy(model), (torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,)))
    before = theirs.weight.data_ptr()
    sam = peers.TwoSteps(theirs.parameters(), torch.optim.SGD, lr=0.1)
    Classification()(theirs, batch).mean().backward()
    sam.first_step()
    Classification()(theirs, batch).mean().backward()
    sam.second_step()
    SAM(rho=peers.RHO).backward(model, batch, Classification())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(theirs.weight, model.weight)
    assert theirs.weight.data_ptr() != before


@pytest.mark.slow
def test_other_sources_are_measured_in_turn(tmp_path: Path) -> None:
    """The files of both are made by processes that import each its own sources."""
    pytest.importorskip("transformers")
    other = tmp_path / "src"
    shutil.copytree(REPOSITORY / "src" / "deltasam", other / "deltasam")
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "speed.py"), "--part", "mlp", "--rounds", "1"]
    command += ["--device", "cpu", "--baseline", str(other), "--out", str(tmp_path / "speed")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    stored = [
        json.loads((tmp_path / folder / "mlp" / "mlp-16x1-fp32.json").read_text())
        for folder in ("speed", "speed-baseline")
    ]
    assert stored[1]["machine"]["commit"] == "baseline", done.stderr
    assert stored[0]["machine"]["commit"] != "baseline"
    assert "  SAM: " in done.stdout


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


@pytest.mark.slow
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
        f"Turns = runpy.run_path({str(REPOSITORY / 'benchmarks' / 'speed_turns.py')!r}, run_name='turns')['Turns']\n"
        "word, _, folder, number, name = sys.argv[1:]\n"
        "if word == 'dies':\n    os.kill(os.getpid(), 9)\n"
        "with Turns(Path(folder), int(number), name).alone():\n    Path(__file__).with_name(name).touch()\n"
    )
    thread = threading.Thread(target=speed["side_by_side"], args=(str(script), [["dies"], ["works"], ["works"]]))
    thread.start()
    thread.join(600)  # three starts of Python take seconds, even on a busy machine
    assert not thread.is_alive()
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "1", "2"}
