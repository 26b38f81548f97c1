"""Sweeps by the command: interrupted at random, with failing runs, two at once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltasam.lab.cli import main
from helpers.folders import classification_task
from helpers.pretrained import bert_folder

Sweep = Callable[..., tuple[int, str, str]]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
COMMON = {
    "schedule": {"steps": 3},
    "batch": {"size": 8},
    "evaluate_every": "end",
    "checkpoint_every": 1,
    "optimizer": {"lr": 1e-3},
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(bert_folder(tmp_path_factory.mktemp("models") / "tiny-bert"))


def write(path: Path, bert: str, **changes: Any) -> Path:
    task = classification_task(path.parent)
    sweep = {"tasks": [task], "models": [bert], "methods": ["erm", "sam"], "common": COMMON, "seeds": [1, 2]}
    path.write_text(yaml.safe_dump(sweep | changes))
    return path


def start(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    command, env = [sys.executable, "-m", "deltasam", "sweep", *map(str, arguments)], {**ENVIRONMENT, **variables}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def anyone_has(variable: str) -> bool:
    """Whether a process has this in its environment, which its children inherit."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable.encode() in file.read_bytes():
                return True
    return False


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=1800)
    return process.returncode, out, err


@pytest.fixture
def here(
    forkserver: None,
    libraries_speak_again: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Sweep:
    """The command in this process, which has imported everything; the runs have their own processes."""
    monkeypatch.setenv("COLUMNS", "200")

    def sweep(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["sweep", *map(str, arguments)])
        return code, *capsys.readouterr()

    return sweep


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]


def results(folder: Path) -> dict[str, int]:
    """Returns the time at which each result was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}


def test_runs_are_made_once_measured_tidied_and_not_repeated(bert: str, tmp_path: Path, here: Sweep) -> None:
    file = write(tmp_path / "small.yaml", bert, risk={"rho": 0.05, "rows": 8, "batch_size": 4}, seeds=[1])
    out = tmp_path / "out"
    code, text, err = here(file, "--output", out)
    assert code == 0, text + err
    assert "2 results, 2 runs trained now, 0 failed" in text
    made = results(out)
    assert len(made) == 2
    for name in made:
        risk = json.loads((out / name / "analysis/adversarial-risk.json").read_text())
        assert risk["value"] > risk["loss"] > 0
        assert (out / name / "model").is_dir()
        assert not (out / name / "checkpoints").exists()
    code, text, err = here(write(file, bert, seeds=[1, 2]), "--output", out)
    assert "4 results, 2 runs trained now, 0 failed" in text, text + err
    assert {name: at for name, at in results(out).items() if name in made} == made


def test_wrong_input_is_not_retried_and_the_other_runs_continue(bert: str, tmp_path: Path, here: Sweep) -> None:
    # More rows per batch than there are, with drop_last: a mistake that shows only once the data is loaded.
    methods = {
        "erm": {"method": "erm"},
        "broken": {"method": "sam", "batch": {"size": 25, "drop_last": True}},
        "gone": {"method": "sam", "model": {"path": str(tmp_path / "gone")}},
    }
    out = tmp_path / "out"
    code, text, _ = here(write(tmp_path / "s.yaml", bert, methods=methods, seeds=[1]), "--output", out)
    assert code == 1
    assert "1 result, 1 run trained now, 2 failed" in text
    assert "leaves no batch" in text
    assert "there is no such folder" in text
    failures = {path.stem: path.read_text() for path in (out / "failures").iterdir()}
    assert sorted("ConfigError" in failure for failure in failures.values()) == [False, True]
    for run in failures:
        assert [event["kind"] for event in journal(out) if event["run"] == run] == ["started", "failed"]


def test_the_stages_of_a_tuned_sweep_and_points_that_all_diverged(bert: str, tmp_path: Path, here: Sweep) -> None:
    grid = {"sam": {"method.rho": [0.01, 0.05]}}
    options = {"tune": {"seeds": [1]}, "seeds": [2], "risk": {"rows": 8}}
    file, out = write(tmp_path / "s.yaml", bert, grid=grid, **options), tmp_path / "out"
    code, text, err = here(file, "--output", out)
    assert code == 0, text + err
    assert len(results(out)) == 4
    assert len(list(out.glob("*-s2-*/analysis/adversarial-risk.json"))) == 2  # of the final runs only
    assert not list(out.glob("*-s1-*/analysis"))
    assert "\n3 runs, 0 already finished" in f"\n{text}"  # with ERM, which has one point only
    assert "with the chosen points: 2 runs, 1 already finished" in text
    events = journal(out)
    here(file, "--output", out)
    assert journal(out) == events  # nothing is missing, not even the risk of the tuning runs
    for path in out.glob("*/result.json"):
        found = json.loads(path.read_text())
        if found["method"] == "SAM":
            path.write_text(json.dumps({**found, "metrics": {**found["metrics"], "loss": float("nan")}}))
    code, text, _ = here(file, "--output", out)
    assert code == 1
    assert ", sam: every point of the grid diverged" in text


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_sweep_explains_how_to_resume(
    bert: str, tmp_path: Path, here: Sweep, monkeypatch: pytest.MonkeyPatch, blow: signal.Signals
) -> None:
    """Exit code 75, as for a run: a batch system restarts both."""
    monkeypatch.setattr("deltasam.lab.sweeps.run_sweep", lambda *_, **__: os.kill(os.getpid(), blow))
    # A shell's background job ignores SIGINT, and so would tests that are started as one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, _, err = here(write(tmp_path / "s.yaml", bert), "--output", tmp_path / "out")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, err) == (75, "deltasam sweep: stopped; finished runs are kept, and the same command continues\n")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="asks the system which processes live")
def test_24_runs_interrupted_three_times_end_with_24_results_and_none_run_twice(bert: str, tmp_path: Path) -> None:
    methods = ["erm", "sam", "delta-sam", "per-instance-sam"]
    file = write(tmp_path / "s.yaml", bert, methods=methods, seeds=[1, 2, 3, 4, 5, 6])
    out = tmp_path / "out"
    chance = random.Random(time.time_ns())
    seen: dict[str, int] = {}
    for blow in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        before = len(results(out))
        process = start(file, "--output", out, "--jobs", 2, DELTASAM_BLOW=f"{tmp_path}/{blow.name}")
        stop_at = before + chance.randint(1, 4)
        while len(results(out)) < stop_at:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        later = time.monotonic() + 2 * chance.random()
        while time.monotonic() < later and len(results(out)) == stop_at:  # a quick machine would make all of them
            time.sleep(0.01)
        process.send_signal(blow)
        process.communicate(timeout=300)
        assert process.returncode == (-9 if blow == signal.SIGKILL else 75), "the sweep had ended before the blow"
        limit = time.monotonic() + 300
        while anyone_has(f"{tmp_path}/{blow.name}"):  # the runs notice that the sweep is gone
            assert time.monotonic() < limit, "a run went on after its sweep had ended"
            time.sleep(0.05)
        now = results(out)
        assert {name: now[name] for name in seen} == seen
        seen = now
    assert len(seen) < 24
    code, text, err = finish(start(file, "--output", out, "--jobs", 2))
    assert code == 0, text + err
    final = results(out)
    assert len(final) == 24
    assert {name: final[name] for name in seen} == seen
    finished = [event["run"] for event in journal(out) if event["kind"] == "finished"]
    assert len(finished) == len(set(finished))


@pytest.mark.slow
def test_two_sweeps_on_one_folder_share_the_work(bert: str, tmp_path: Path) -> None:
    file, out = write(tmp_path / "s.yaml", bert, seeds=[1, 2, 3]), tmp_path / "out"
    both = [start(file, "--output", out) for _ in range(2)]
    for code, text, err in map(finish, both):
        assert code == 0, text + err
        assert "6 results" in text
    finished = [event["run"] for event in journal(out) if event["kind"] == "finished"]
    assert len(finished) == len(set(finished)) == 6


def test_a_dry_run_lists_the_runs_and_reports_mistakes(bert: str, tmp_path: Path, here: Sweep) -> None:
    code, text, _ = here(write(tmp_path / "s.yaml", bert), "--dry-run")
    assert code == 0
    assert "4 runs" in text
    code, _, err = here(write(tmp_path / "t.yaml", bert, methods=["samm"]), "--output", tmp_path / "no")
    assert code == 2
    assert "did you mean SAM" in err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qick"], "qick: there is no such file, and no included sweep of this name; did you mean quick?"),
        (["nope.yaml"], "nope.yaml: there is no such file\n"),
        (["quick", "--jobs", "0"], "--jobs 0: must be at least 1"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_damaged_results_are_not_finished(bert: str, tmp_path: Path, here: Sweep) -> None:
    file = write(tmp_path / "few.yaml", bert)
    code, out, _ = here(file, "--output", tmp_path / "runs", "--dry-run")
    names = [line.split()[1] for line in out.splitlines()[:-1]]
    assert (code, len(names), out.count("missing")) == (0, 4, 4)
    for name, text in zip(names, ("", "{}"), strict=False):
        path = tmp_path / "runs" / name / "result.json"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    code, out, err = here(file, "--output", tmp_path / "runs", "--dry-run")
    assert [line.split()[0] for line in out.splitlines()] == ["damaged", "damaged", "missing", "missing", "4"]
    assert err.count("not a result") == 2
    assert f"{names[0]}/result.json: " in err
    assert "remove it" in err
