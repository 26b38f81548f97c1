"""Commands about runs, first in a new process, then in this one."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltasam.lab.cli import main
from deltasam.lab.tasks import TASKS, SentenceTask
from helpers.pretrained import bart_folder, bert_folder

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
SMALL = ("task.train_rows=24", "task.eval_rows=20", "batch.size=8", "optimizer.lr=1e-3")


def deltasam(*words: object) -> subprocess.CompletedProcess[str]:
    """Runs the command in a new process."""
    command = [sys.executable, "-m", "deltasam", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)


def here(*words: object) -> int:
    """Runs the command in this process, which has imported everything already."""
    return main([str(word) for word in words])


pytestmark = pytest.mark.usefixtures("libraries_speak_again")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("models") / "bert")


def result(folder: Path) -> dict[str, object]:
    return json.loads((folder / "result.json").read_text())


def test_train_repeat_evaluate_analyze(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options = ("--task", "docstrings", "--model", bert, "--method", "delta-sam", "--seed", 3)
    done = deltasam("train", *options, "--output", run, *SMALL, "schedule.steps=3", "method.rho=0.02")
    assert done.returncode == 0, done.stderr
    assert "DeltaSAM" in done.stdout
    assert "3/3" in done.stderr  # progress
    assert str(run) in done.stdout
    assert result(run)["config"]["method"]["rho"] == 0.02

    assert here("train", "--config", run / "config.yaml", "--output", run) == 0
    assert "finished already" in capsys.readouterr().out
    assert here("train", "--config", run / "config.yaml", "--dry-run") == 0
    assert capsys.readouterr().out == (run / "config.yaml").read_text()
    assert here("evaluate", run, "--rows", 20, "--json") == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == pytest.approx(result(run)["metrics"])
    assert here("analyze", "adversarial-risk", run, "--rows", 12, "--json") == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert line["adversarial risk"] > line["loss"]


def test_repeated_from_its_config_it_is_the_same_run(bert: Path, tmp_path: Path) -> None:
    options = ("train", "--task", "docstrings", "--model", bert, "--method", "sam", *SMALL, "schedule.steps=2")
    assert here(*options, "--output", tmp_path / "first") == 0
    assert here("train", "--config", tmp_path / "first/config.yaml", "--output", tmp_path / "second") == 0
    one, other = (load_file(tmp_path / name / "model/model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_other_analyses(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    kernels = torch.backends.mkldnn.enabled
    assert here("train", "--task", "docstrings", "--model", bert, "--output", run, *SMALL, "schedule.steps=2") == 0
    capsys.readouterr()
    for name, column in (("sharpness", "R_inst"), ("alignment", "regulariser"), ("weights", "snr")):
        try:
            assert here("analyze", name, run, "--rows", 8, "--batch-size", 8) == 0
        except RuntimeError as error:
            if "pack_vnni2" not in str(error):
                raise
            pytest.skip("torch has no attention in bfloat16 for this instruction set")
        out, err = capsys.readouterr()
        table, _, legend = out.partition("\n\n")
        assert column in table
        assert column in legend  # with its meaning and unit
        assert "8 rows of" in err
    some = ("--weightings", "FiniteDifference", "--draws", 2, "--rows", 8, "--batch-size", 4)
    assert here("analyze", "weights", run, *some, "--conditions", "float64", "another direction", "--json") == 0
    lines = json.loads(capsys.readouterr().out)
    assert [line["condition"] for line in lines] == ["float64", "another direction"]
    assert lines[0]["snr"] is None  # infinite
    assert len(lines[1]["by_batch"]["ideal"]) == 2
    assert here("analyze", "alignment", run, *some) == 0
    assert re.search(r"DeltaSAM FiniteDifference +-?[\d.]+ \[", capsys.readouterr().out)  # with its interval
    both = ("--weightings", "{name: finite-difference, radius: 0.5}", "FiniteDifference", "--conditions", "float32")
    assert here("analyze", "weights", run, *both, "--rows", 4, "--draws", 3, "--json") == 0
    lines = json.loads(capsys.readouterr().out)
    assert [line["weighting"] for line in lines] == ["FiniteDifference(radius=0.5)", "FiniteDifference"]
    for wrong, message in (
        ("FiniteDiference", "--weightings: there is no 'FiniteDiference'; did you mean FiniteDifference?"),
        ("{name: FiniteDifference, radius: -1}", "--weightings: radius=-1.0 must be a number in (0, inf)"),
        ("{name: ", "--weightings {name: : must be a name, or a name with options such as"),
    ):
        assert here("analyze", "weights", tmp_path / "none", "--weightings", wrong) == 2
        assert message in capsys.readouterr().err
    assert here("analyze", "alignment", run, "--draws", 0) == 2
    assert "--draws 0" in capsys.readouterr().err
    assert torch.backends.mkldnn.enabled == kernels  # torch switches it off for bfloat16 on a CPU without bfloat16
    assert here("analyze", "sharpness", tmp_path, "--rows", 8) == 0  # the runs in it
    (tmp_path / "empty").mkdir()
    assert here("analyze", "sharpness", tmp_path / "empty") == 2
    assert "run folder" in capsys.readouterr().err
    shutil.rmtree(run / "model")
    for command in (("evaluate",), ("analyze", "sharpness"), ("analyze", "examples"), ("analyze", "landscape")):
        assert here(*command, run) == 2
        assert f"{run}: the run has kept no weights" in capsys.readouterr().err
    (run / "result.json").write_text("{}")
    assert here("train", "--config", run / "config.yaml", "--output", run) == 2
    error = capsys.readouterr().err
    assert "result.json: not a result of this version (it has no run_id); remove it" in error


@pytest.mark.parametrize(
    "words",
    [
        "analyze sharpness x --rho -1",
        "analyze adversarial-risk x --rows 0",
        "analyze weights x --batch-size 0",
        "analyze sharpness x --steps 0",
        "analyze alignment x --eta 0",
        "analyze examples x --most 0",
        "analyze landscape x --rho nan",
        "evaluate x --rows 0",
        "evaluate x --batch-size -3",
        "table adversarial-risk . --measure --rho -1",
        "quickstart --rho 0",
    ],
)
def test_options_that_must_be_positive(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    option, value = words.split()[-2:]
    assert f"{option} {value}: must be greater than 0" in capsys.readouterr().err


def test_a_folder_in_a_file(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/run"):
        assert here("train", "--task", "docstrings", "--model", bert, "--output", tmp_path / folder) == 2
        assert f"{tmp_path / 'file'} is a file; choose a folder by --output" in capsys.readouterr().err


@pytest.mark.data
@pytest.mark.parametrize(
    "task",
    ["mrpc", "mirror", "cnn_dailymail", *(pytest.param(task, marks=pytest.mark.slow) for task in ("cola", "stsb"))],
)
def test_train_on_real_data(shared: Path, bert: Path, tmp_path: Path, task: str) -> None:
    special: tuple[str, ...] = ()
    model = bert
    if task == "mirror":
        special = ("task.eval_rows=150", "regularisers=[{name: EmbeddingNoise, scale: 0.1}]")
    if task == "cnn_dailymail":
        model = bart_folder(tmp_path / "bart")
        special = ("task.max_length=48", "task.max_target_length=10", "task.min_target_length=2", "task.eval_rows=4")
    code = here(
        "train", "--task", task, "--model", model, "--method", "delta-sam", "--data", shared / "data",
        "--output", tmp_path / "run", *SMALL, "schedule.steps=2", *special,
    )  # fmt: skip
    assert code == 0
    found = result(tmp_path / "run")
    primary = {"cola": "matthews", "stsb": "pearson", "mirror": "sts_average", "cnn_dailymail": "rouge1"}
    assert found["primary_metric"] == primary.get(task, "accuracy")
    assert (found["steps"], found["forward_passes"], found["backward_passes"]) == (2, 8, 4)
    assert all(-1 <= found["metrics"][name] <= 1 for name in found["config"]["task"]["metrics"])


def test_own_files(bert: Path, tmp_path: Path) -> None:
    table = "title,stars\n" + "".join(f"it is {i % 7} of {i},{['bad', 'good'][i % 2]}\n" for i in range(30))
    (tmp_path / "own.csv").write_text(table)
    files = (f"task.files.train={tmp_path / 'own.csv'}", f"task.files.validation={tmp_path / 'own.csv'}")
    columns = ("task.text=title", "task.label=stars")
    options = ("train", "--task", "classification", "--model", bert, "--output", tmp_path / "run")
    assert here(*options, *files, *columns, "schedule.steps=2") == 0
    assert json.loads((tmp_path / "run/model/config.json").read_text())["id2label"] == {"0": "bad", "1": "good"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "mrcp"], "did you mean mrpc"),
        (["--method", "delta-sma"], "did you mean DeltaSAM"),
        (["--model", "./nowhere"], "there is no such folder"),
        (["--preset", "glue/bert-base/mrcp"], "did you mean glue/bert-base/mrpc"),
        (["method.roh=1"], "did you mean rho"),
        (["--metod", "sam"], "--method"),
        (["seed"], "section.option=value"),
        (["seed", "method.rho=1"], "'seed': a setting has the form section.option=value"),
        (["seed", "--dry-run", "method.rho=1"], "'seed': a setting has the form section.option=value"),
        (["glue/bert-base/mrpc", "seed=3"], "did you mean --preset glue/bert-base/mrpc"),
        (["mrpc", "seed=3"], "did you mean --task mrpc"),
        (["--data", "./nowhere"], "does not exist"),
        (["--task", "classification", "task.files.train=nowhere.csv", "task.files.validation=x.csv"], "no such file"),
        (["task.text=[sentence1, sentense2]"], "did you mean 'sentence2'"),
    ],
)
def test_bad_input_is_one_clear_error(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    base = [
        "train",
        "--task",
        "docstrings",
        "--model",
        str(bert),
        "--method",
        "sam",
        "--output",
        str(tmp_path / "run"),
    ]
    try:
        code = main([*base, *words])
    except SystemExit as stop:  # tyro's own, for options
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_folder_of_another_run(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    assert (
        here("train", "--task", "docstrings", "--model", bert, "--output", tmp_path / "run", "optimizer.lr=1e-3") == 2
    )
    error = capsys.readouterr().err
    assert error.strip().count("\n") == 0
    assert "not empty and holds no run" in error
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_lists(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mine = SentenceTask(name="mine", text=("text",), label="label", files={"train": "a.csv", "validation": "b.csv"})
    monkeypatch.setitem(TASKS, "mine", mine)
    assert main(["list", "tasks"]) == 0
    assert main(["list", "presets", "glue/bert-base"]) == 0
    assert main(["list", "presets", "--names"]) == 0
    printed = capsys.readouterr().out
    assert "docstrings" in printed
    assert "a.csv, b.csv" in printed
    assert "summarization/bart-large/delta-sam" in printed
    assert main(["list", "presets", "nothing"]) == 2


CASES = {
    "ERM": ["--method", "erm"],
    "SAM": ["--method", "sam"],
    "DeltaSAM": ["--method", "delta-sam"],
    "PerInstanceSAM": ["--method", "per-instance-sam", "method.rho=0.02"],
    "LookSAM": ["--method", "look-sam"],
    "SMART": ["--method", "erm", "regularisers=[SMART]"],
}


@pytest.mark.slow  # tests/faults/test_runs.py kills runs, too, and is not slow
@pytest.mark.parametrize("case", CASES)
def test_killed_run_ends_like_an_undisturbed_one(bert: Path, tmp_path: Path, case: str) -> None:
    options = ["train", "--task", "docstrings", "--model", str(bert), *CASES[case], *SMALL]
    options += ["schedule.epochs=14", "checkpoint_every=5"]  # 42 updates
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # In a new process, too: an earlier test with bfloat16 may have made torch change its kernels in this one.
    done = deltasam(*options, "--output", whole)
    assert done.returncode == 0, done.stderr

    lines = random.Random(case).randrange(2, 30)
    command = [sys.executable, "-m", "deltasam", *options, "--output", str(parts)]
    while True:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        log = parts / "metrics.jsonl"
        while process.poll() is None and not (log.is_file() and log.read_bytes().count(b"\n") >= lines):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() in (0, -signal.SIGKILL)
        if not (parts / "result.json").exists():
            break
        shutil.rmtree(parts)  # the run ended before it could be killed

    done = deltasam(*options, "--output", parts)
    assert done.returncode == 0, done.stderr
    one, other = (load_file(folder / "model/model.safetensors") for folder in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (whole / "metrics.jsonl").read_text() == (parts / "metrics.jsonl").read_text()
    assert result(whole)["metrics"] == result(parts)["metrics"]
    assert result(whole)["forward_passes"] == result(parts)["forward_passes"]
