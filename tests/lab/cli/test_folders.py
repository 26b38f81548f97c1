"""Commands on folders of runs: damaged files, other settings, contradictory options."""

from __future__ import annotations

import errno
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from deltasam.lab.cli import main
from deltasam.lab.experiments import RunConfig, run
from helpers.pretrained import bert_folder
from helpers.results import write_run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.usefixtures("libraries_speak_again"),
]
FEW = ["--points", "3", "--plane", "0", "--rows", "4"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep: two runs with weights, one without, one unfinished, and other files."""
    place = tmp_path_factory.mktemp("made")
    rows = ["text,label", *(f"{'the cat sat' if i % 2 else 'a dog ran'} {i},{i % 2}" for i in range(8))]
    (place / "rows.csv").write_text("\n".join(rows))
    files = dict.fromkeys(("train", "validation"), str(place / "rows.csv"))
    task = {"name": "classification", "files": files, "text": "text", "label": "label", "max_length": 24}
    plain = {"task": task, "model": str(bert_folder(place / "bert")), "batch": {"size": 8}, "schedule": {"steps": 1}}
    for method in ("erm", "delta-sam"):
        config = RunConfig.from_plain({**plain, "method": method, "checkpoint_every": "never"})
        run(config, place / "runs/my" / method)
    sweep = place / "runs/my"
    (sweep / "locks").mkdir()
    (sweep / "sweep.jsonl").touch()
    shutil.copytree(sweep / "erm", sweep / "without")
    shutil.rmtree(sweep / "without/model")
    (sweep / "begun").mkdir()
    shutil.copy(sweep / "erm/config.yaml", sweep / "begun")
    return place / "runs"


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """A copy of the folder."""
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.mark.parametrize("inside", [False, True])
def test_runs_in_a_folder_are_measured_and_the_rest_is_skipped(
    runs: Path, capsys: pytest.CaptureFixture[str], inside: bool
) -> None:
    named = sorted((runs / "my").iterdir()) if inside else [runs / "my"]
    assert main(["analyze", "landscape", *map(str, named), *FEW]) == 0
    shown = capsys.readouterr()
    found, _, legend = shown.out.partition("\n\n")
    assert [line.partition(":")[0] for line in found.splitlines()] == ["delta-sam", "erm"]
    assert "plane" not in legend  # --plane 0
    assert "without: the run has kept no weights" in shown.err
    assert "begun: the run is not finished" in shown.err
    assert ("locks: not a run folder" in shown.err) == inside
    assert main(["analyze", "examples", *map(str, named), "--rows", "4"]) == 0
    assert "ERM does not weight instances" in capsys.readouterr().err
    assert main(["analyze", "sharpness", *map(str, named), "--rows", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_nothing_to_measure_is_an_error(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (
        ("without", "has kept no weights"),
        ("locks", "run folder"),
        ("nowhere", "run folder"),
    ):
        assert main(["analyze", "landscape", str(runs / "my" / name), *FEW]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", '{"settings": {"points": 3', '{"settings": {}, "lines": {"a": {}}}'])
def test_a_damaged_landscape_is_measured_again(runs: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    kept = runs / "my/erm/analysis/landscape.json"
    kept.parent.mkdir()
    kept.write_text(text)
    assert main(["analyze", "landscape", str(runs / "my/erm"), *FEW]) == 0
    assert "landscape.json: incomplete or changed; measuring again" in capsys.readouterr().err
    assert set(json.loads(kept.read_text())) == {"settings", "lines", "planes"}


def test_a_run_with_damaged_weights_is_skipped(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = runs / "my/erm/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert main(["analyze", "sharpness", str(runs / "my/erm"), str(runs / "my/delta-sam"), "--rows", "4"]) == 0
    shown = capsys.readouterr()
    assert "DeltaSAM" in shown.out
    assert f"skipped: {runs / 'my/erm'}: model " in shown.err
    assert main(["analyze", "sharpness", str(runs / "my/erm"), "--rows", "4"]) == 2
    assert "could not be loaded" in capsys.readouterr().err


def test_the_risk_at_another_radius_is_measured_again(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = runs / "my/erm/analysis/adversarial-risk.json"
    words = ["table", "adversarial-risk", str(runs / "my/erm"), "--measure"]
    assert main([*words, "--rows", "4"]) == 0
    first = json.loads(kept.read_text())
    assert first["settings"]["rho"] == 0.05
    written = kept.stat().st_mtime_ns
    assert main(words) == 0  # already measured
    assert kept.stat().st_mtime_ns == written
    assert main([*words, "--rho", "0.5"]) == 0
    second = json.loads(kept.read_text())
    assert second["settings"] == {**first["settings"], "rho": 0.5}
    assert second["value"] > first["value"]
    assert "Ours at rho = 0.5." in capsys.readouterr().out
    kept.write_text("[]")
    assert main(words) == 0
    assert json.loads(kept.read_text())["settings"]["rho"] == 0.05
    assert main(["table", "glue", str(runs), "--rho", "0.5"]) == 2
    assert "--rho is for the table adversarial-risk" in capsys.readouterr().err
    assert main(["table", "adversarial-risk", str(runs), "--rows", "8"]) == 2
    assert "--rows needs --measure" in capsys.readouterr().err


def damage(runs: Path, *names: str) -> None:
    for name in names:
        weights = runs / f"my/{name}/model/model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])


def test_the_risk_of_the_other_runs_is_measured(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(runs, "delta-sam")  # the first one
    words = ["table", "adversarial-risk", str(runs), "--measure", "--rows", "4"]
    for _ in range(2):  # the second time there is nothing else to measure
        assert main(words) == 0
        shown = capsys.readouterr()
        assert f"skipped: {runs / 'my/delta-sam'}: model " in shown.err
        assert "Ours at rho = 0.05." in shown.out
        assert (runs / "my/erm/analysis/adversarial-risk.json").is_file()


def test_no_risk_can_be_measured(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(runs, "erm", "delta-sam")
    assert main(["table", "adversarial-risk", str(runs), "--measure"]) == 2
    shown = capsys.readouterr()
    assert f"deltasam table: {runs / 'my/delta-sam'}: model " in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("option", ["--task", "--model", "--set"])
def test_a_run_folder_has_its_own_task(runs: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    value = "task.max_length=8" if option == "--set" else "rte"
    assert main(["evaluate", str(runs / "my/erm"), option, value]) == 2
    assert f"{value if option == '--set' else option} would be ignored" in capsys.readouterr().err


def test_a_run_is_evaluated_on_a_file_it_did_not_have(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["evaluate", str(runs / "my/erm"), "--split", "test"]
    assert main(asked) == 2
    assert "no file for the split 'test', only for train, validation; add one: task.files.test=" in (
        capsys.readouterr().err
    )
    (tmp_path / "later.csv").write_text("text,label\nthe cat sat,1\na dog ran,0\n")
    monkeypatch.chdir(tmp_path)
    assert main([*asked, "--set", "task.files.test=later.csv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], Path(found["origin"]).name) == (2, "later.csv")


def test_only_the_first_process_of_torchrun_prints(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--config", str(runs / "my/erm/config.yaml"), "--output", str(runs / "my/erm")]
    for rank, prints in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert main(words) == 0
        shown = capsys.readouterr()
        assert bool(shown.out + shown.err) == prints


@pytest.mark.parametrize("command", [["report"], ["table", "glue", "--format", "csv"]])
def test_an_output_that_cannot_be_written_is_one_line(
    runs: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (runs / "file").touch()
    for place in (runs, runs / "file/page"):
        assert main([*command, str(runs), "--output", str(place)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"deltasam {' '.join(command[:1])}")
        assert str(runs) in error
        assert error.endswith("choose another place\n")
        assert error.count("\n") == 1


def test_a_run_that_diverged_is_skipped(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs / "my/erm/model/model.safetensors"
    save_file({name: torch.full_like(value, math.nan) for name, value in load_file(path).items()}, path)
    assert main(["analyze", "landscape", str(runs / "my"), *FEW]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("delta-sam:")
    assert "erm: the gradient of the mean loss has norm nan" in shown.err
    assert main(["analyze", "landscape", str(runs / "my/erm"), *FEW]) == 2
    assert "erm: the gradient of the mean loss has norm nan" in capsys.readouterr().err
    assert main(["evaluate", str(runs / "my/erm"), "--json"]) == 0
    assert '"loss": null' in capsys.readouterr().out  # JSON has no NaN
    assert main(["table", "adversarial-risk", str(runs), "--measure", "--rows", "4"]) == 0
    assert f"skipped: {runs / 'my/erm'}: the adversarial risk is nan; the run has diverged" in capsys.readouterr().err


def test_brackets_in_a_path_are_literal(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs [old]/erm"
    shutil.copytree(made / "my/erm", folder)
    assert main(["train", "--config", str(folder / "config.yaml"), "--output", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert f"To repeat it, remove {folder}." in shown
    assert f"Run folder: {folder}" in shown
    files = [f"task.files.{name}={folder}/rows.csv" for name in ("train", "validation")]
    shutil.copy(made.parent / "rows.csv", folder)
    words = ["--task", "classification", "--model", str(folder / "model"), "--set", *files]
    assert main(["evaluate", *words]) == 0
    assert f"8 rows of {folder}/rows.csv" in capsys.readouterr().out


def test_a_table_notes_runs_that_it_does_not_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "glue", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "", "there is no run"
    for seed in (1, 2):
        write_run(tmp_path, "reviews", seed=seed, metrics={"accuracy": 0.5})
    note = f"not shown: 2 finished runs (reviews); see them with: deltasam report {tmp_path}\n"
    for table in ("glue", "adversarial-risk"):  # a table without runs; a measurement that no run has
        assert main(["table", table, str(tmp_path)]) == 0
        assert capsys.readouterr().err == f"deltasam table {table}: {note}"
    write_run(tmp_path, "rte", seed=1, metrics={"accuracy": 0.5})
    for words in ([], ["--format", "csv"], ["--output", str(tmp_path / "table.md")]):
        assert main(["table", "glue", str(tmp_path), *words]) == 0
        assert capsys.readouterr().err == f"deltasam table glue: {note}"
    assert main(["table", "running-time", str(tmp_path)]) == 0, "this table has all tasks"
    assert capsys.readouterr().err == ""


def test_a_report_mentions_unreadable_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        write_run(tmp_path, "reviews", seed=seed, metrics={"accuracy": 0.5})
    words = ["report", str(tmp_path), "--output", str(tmp_path / "page.html")]
    assert main(words) == 0
    assert capsys.readouterr().out.count("\n") == 1
    damaged = sorted(tmp_path.rglob("result.json"))[0]
    damaged.write_text("{")
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("1 run, ")
    assert f"- 1 run unreadable, such as {damaged.parent}" in shown


@pytest.mark.parametrize(("columns", "parts"), [(80, 2), (200, 1)])
def test_a_table_fits_a_narrow_terminal(
    tmp_path: Path, columns: int, parts: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The column with the names keeps its width."""
    write_run(tmp_path, "rte", seed=1, metrics={"accuracy": 0.5})
    console = Console(width=columns, soft_wrap=True, markup=False)
    monkeypatch.setattr("deltasam.lab.cli.table.wide_console", lambda: console)
    assert main(["table", "glue", str(tmp_path)]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("- ")]
    assert max(map(len, shown[1:])) <= columns  # the title may be wrapped
    assert sum("δ-SAM, paper" in line for line in shown) == 2 * parts  # two models of the paper
    assert not any("…" in line for line in shown)
    assert sum(line.count("50.0") for line in shown) == 1


@pytest.mark.parametrize("command", [["report"], ["table", "glue", "--format", "csv"]])
def test_a_full_disk_does_not_destroy_the_earlier_file(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs", "rte", seed=1, metrics={"accuracy": 0.5})
    page = tmp_path / "page"
    page.write_text("earlier")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert main([*command, str(tmp_path / "runs"), "--output", str(page)]) == 1
    assert f"{page}: No space left on device; free some space" in capsys.readouterr().err
    assert page.read_text() == "earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page", "runs"]
