"""``deltasam bench train`` compares the wall time of trainings."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from deltasam.lab.bench.train import Trained, Training, measure, median_gap, show
from deltasam.lab.cli import main
from helpers.data import REPOSITORY
from helpers.pretrained import bert_folder

SMALL = ("batch.size=4", "--steps", "2", "--warmup", "1")


pytestmark = pytest.mark.usefixtures("libraries_speak_again")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight rows of MRPC and of RTE in the layout of a local folder."""
    folder = tmp_path_factory.mktemp("data")
    for task, split in product(("mrpc", "rte"), ("train", "validation")):
        (folder / task).mkdir(exist_ok=True)
        rows = [
            {"sentence1": f"the file is {n}", "sentence2": f"{n} is the name", "label": n % 2, "idx": n}
            for n in range(8)
        ]
        with gzip.open(folder / task / f"{split}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def trained(seconds: float, method: str = "sam") -> Trained:
    passes = {"erm": 1, "sam": 2}.get(method, 4)
    return Trained(
        train_seconds=seconds, seconds_per_update=seconds / 10, updates=10, forwards=10 * passes, backwards=20,
        skipped=0, metric="accuracy", value=0.5, peak_bytes=1, device="cpu",
    )  # fmt: skip


OPTIONS = {"task": "mrpc", "model": "m", "precision": "fp32", "repeats": 2}


def test_ratios_are_computed_within_a_repetition(capsys: pytest.CaptureFixture[str]) -> None:
    plan = [Training("erm", "eager"), Training("SAM", "eager"), Training("delta-sam", "captured")]
    seconds = {
        "erm": (1.0, 10.0),
        "SAM": (2.0, 20.0),
        "delta-sam": (0.5, 5.0),
    }  # the second repetition is slow for all
    order = []

    def run(each: Training, number: int) -> Trained:
        order.append((each.method, number))
        return trained(seconds[each.method][number], each.method)

    report = measure(plan, run, repeats=2, options=OPTIONS, machine={"torch": "x"})
    assert order == [(name, number) for number in (0, 1) for name in ("erm", "SAM", "delta-sam")]
    rows = {row.name: row for row in report.rows}
    assert rows["delta-sam captured"].times_sam.median == 0.25
    assert rows["delta-sam captured"].times_erm.median == 0.5
    assert rows["delta-sam captured"].times_sam.low == rows["delta-sam captured"].times_sam.high == 0.25
    show(report)
    assert "median of 2" in capsys.readouterr().out


def test_ratios_need_an_eager_run(capsys: pytest.CaptureFixture[str]) -> None:
    plan = [Training("sam", "captured"), Training("delta-sam", "eager")]
    report = measure(plan, lambda *_: trained(1.0), repeats=1, options=OPTIONS, machine={"torch": "x"})
    assert [row.times_sam for row in report.rows] == [None, None]
    show(report)
    assert "x SAM" not in capsys.readouterr().out


def test_a_training_that_was_not_made_has_no_row() -> None:
    plan = [Training("sam", "eager"), Training("delta-sam", "compiled")]
    made = {"sam": trained(2.0), "delta-sam": None}
    report = measure(plan, lambda each, _: made[each.method], repeats=2, options=OPTIONS, machine={"torch": "x"})
    assert [row.name for row in report.rows] == ["sam"]


def test_the_script_trains_with_torch_and_transformers_alone(bert: Path, data: Path, tmp_path: Path) -> None:
    """The third update meets the first rows again; ERM and SAM see the same batches."""
    script = REPOSITORY / "benchmarks" / "end_to_end.py"
    blocked = dict.fromkeys(("tyro", "pydantic", "datasets", "sklearn", "scipy", "pandas", "peft", "rich"))
    words = ["--data", data, "--model", bert, "--tasks", "mrpc", "--updates", "3", "--batch", "4", "--device", "cpu"]
    words += ["--methods", "erm", "sam", "--ways", "eager", "captured", "--precision", "fp32", "--out", tmp_path]
    code = f"import runpy, sys; sys.modules.update({blocked!r}); sys.argv[1:] = {list(map(str, words))!r}; "
    code += f"sys.path.insert(0, {str(script.parent)!r}); runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stored = json.loads((tmp_path / "mrpc.json").read_text())
    assert [row["name"] for row in stored["rows"]] == ["erm", "sam", "erm captured", "sam captured"], done.stdout
    passes = {row["name"]: (row["runs"][0]["forwards"], row["runs"][0]["backwards"]) for row in stored["rows"]}
    assert passes["erm"] == (3, 3)
    assert passes["sam"] == passes["sam captured"] == (6, 6)
    assert all(row["runs"][0]["prepare_seconds"] > 0 for row in stored["rows"])
    assert str(tmp_path) not in json.dumps(stored)
    assert str(data) not in json.dumps(stored)


def test_the_script_trains_several_tasks_side_by_side(bert: Path, data: Path, tmp_path: Path) -> None:
    """A training of one task that fails does not stop the others."""
    script = REPOSITORY / "benchmarks" / "end_to_end.py"
    words = ["--data", data, "--model", bert, "--tasks", "mrpc", "rte", "--updates", "1", "--batch", "2"]
    words += ["--methods", "erm", "nosuch", "sam", "--ways", "eager", "--device", "cpu", "--precision", "fp32"]
    command = [sys.executable, script, *words, "--out", tmp_path, "--side-by-side"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    for task in ("mrpc", "rte"):
        stored = json.loads((tmp_path / f"{task}.json").read_text())
        assert [row["name"] for row in stored["rows"]] == ["erm", "sam"], done.stdout + done.stderr
        assert "--meet" not in stored["command"]


def test_the_median_time_between_updates() -> None:
    assert median_gap([10.0]) is None
    assert median_gap([10.0, 11.0, 12.0, 20.0]) == 1.0  # one waited for an evaluation


def test_trains_from_a_local_folder_without_the_package_datasets(
    bert: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    probing = "delta-sam:probe_every=2,weighting.name=finite-difference,weighting.precision=ambient"
    methods = ("--methods", "sam", probing, "--ways", "eager", "captured")
    files = ("--data", data, "--output", tmp_path / "runs", "--json", tmp_path / "out.json")
    (tmp_path / "runs/warm-up/left").mkdir(parents=True)  # of an earlier version
    assert main([str(word) for word in ("bench", "train", "mrpc", "--model", bert, *SMALL, *methods, *files)]) == 0
    shown = capsys.readouterr()
    gpu = torch.cuda.is_available()
    assert "x SAM" in shown.out
    assert [way in shown.err for way in ("warm-up eager", "warm-up captured")] == [True, gpu]
    assert ("sam captured" in shown.err, "captured is skipped: it needs a GPU" in shown.err) == (gpu, not gpu)
    stored = json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in stored["rows"]][:2] == ["sam", probing]
    assert [row["way"] for row in stored["rows"]] == ["eager", "eager", *["captured"] * 2 * gpu]
    assert [row["runs"][0]["forwards"] for row in stored["rows"][:2]] == [4, 6]
    assert all(row["runs"][0]["updates"] == 2 for row in stored["rows"])
    assert str(tmp_path) not in json.dumps(stored)  # no paths of this machine
    assert not list(tmp_path.glob("runs/*/model"))
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 2 + 2 * gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_captured_needs_a_gpu(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", "mrpc", "--model", str(bert), "--ways", "captured"]) == 2
    assert "--ways captured: needs a GPU; use --ways eager" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nosuch",), "nosuch"),
        (("mrpc", "--methods", "sma"), "there is no 'sma'"),
        (("mrpc", "--methods", "sam:rho"), "name:option=value"),
        (("mrpc", "--methods", "sam:radius=1"), "radius"),
        (("mrpc", "--repeats", "0"), "--repeats 0: must be at least 1"),
        (("mrpc", "--data", "nowhere"), "does not exist"),
    ],
)
def test_bad_input_is_one_line(
    bert: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "train", *words, "--model", str(bert)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
