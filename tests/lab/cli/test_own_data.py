"""From the user's files to a comparison: ``compare``, ``train`` without a learning rate, ``table results``."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deltasam.lab import sweeps
from deltasam.lab.cli import main
from deltasam.lab.experiments import RunConfig, run
from helpers.folders import classification_task
from helpers.pools import InThisProcess
from helpers.pretrained import bert_folder

Command = Callable[..., tuple[int, str, str]]
SHORT = ("batch.size=8", "task.max_length=24", "evaluate_every=end")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.usefixtures("libraries_speak_again"),
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(bert_folder(tmp_path_factory.mktemp("models") / "bert"))


@pytest.fixture
def deltasam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in a folder with ``rows.csv``, which has 24 rows of two classes."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sweeps, "LocalPool", InThisProcess)
    monkeypatch.chdir(tmp_path)
    classification_task(tmp_path)

    def command(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return command


def test_compare_ends_with_a_table_and_a_report_and_is_not_repeated(bert: str, deltasam: Command) -> None:
    words = ("compare", "--train", "rows.csv", "--test", "rows.csv", "--model", bert, "--seeds", 1, *SHORT)
    words = (*words, "optimizer.lr=0.01", "schedule.steps=1", "method.rho=0.02")
    code, out, err = deltasam(*words, "--methods", "plain", "per-instance")
    assert code == 0, out + err
    assert "2 runs, 0 already finished" in out
    folder = Path("runs/compare-rows")
    assert f"{folder}/report.html" in out
    assert (folder / "report.html").read_text().startswith("<!")
    found = {path.parent: json.loads(path.read_text()) for path in folder.glob("*/result.json")}
    radii = {result["method"]: result["config"]["method"].get("rho") for result in found.values()}
    assert radii == {"ERM": None, "PerInstanceSAM": 0.02}  # of the methods that have one
    assert all((place / "model").is_dir() and not (place / "checkpoints").exists() for place in found)

    code, out, err = deltasam(*words, "--methods", "ERM", "PerInstanceSAM", "sam")
    assert "3 runs, 2 already finished" in out, out + err
    code, out, _ = deltasam("table", "results", folder, "--methods", "δ-sam", "per-instance SAM")
    assert code == 2
    code, out, _ = deltasam("table", "results", folder, "--methods", "per-instance SAM", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert {(row["setup"], row["n"], row["settings"]) for row in rows} == {
        ("classification, bert", "1", "lr 0.01, rho 0.02")
    }
    code, _, err = deltasam("table", "results", folder, "--aggregate", "max")
    assert (code, "--aggregate is for the paper's tables" in err) == (2, True)
    unreadable = folder / "unreadable"
    unreadable.mkdir()
    (unreadable / "result.json").write_text("{")
    _, out, err = deltasam("table", "results", folder, "--format", "markdown")
    assert "unreadable" in err
    assert "unreadable" not in out


def test_compare_names_a_file_that_has_changed_since_its_runs(
    bert: str, deltasam: Command, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("compare", "--train", "rows.csv", "--test", "rows.csv", "--model", bert, "--methods", "erm", *SHORT)
    for seeds, changed in ((1, False), (1, False), (2, True)):
        if changed:
            rows = Path("rows.csv").read_text().splitlines()
            Path("rows.csv").write_text("\n".join([*rows[:1], *rows[:1:-1]]))
        caplog.clear()
        assert deltasam(*words, "--seeds", seeds, "optimizer.lr=0.01", "schedule.steps=1")[0] == 0
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert any("rows.csv" in text for text in warned) == changed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--methods", "sma"), "did you mean SAM?"),
        (("--methods",), "--methods"),
        (("--text", "review"), "review"),
        (("seed=3",), "--seeds"),
        (("--seeds", 0), "--seeds 0"),
    ],
)
def test_compare_reports_mistakes_before_any_training(
    words: tuple[object, ...], message: str, bert: str, deltasam: Command
) -> None:
    options = ("--train", "rows.csv", "--test", "rows.csv", "--model", bert)
    code, _, err = deltasam("compare", *options, *SHORT, *words)
    assert code == 2
    assert message in err
    assert not Path("runs").exists()


def test_the_learning_rate_is_chosen_said_and_recorded(bert: str, deltasam: Command) -> None:
    files = [f"task.files.{split}=rows.csv" for split in ("train", "validation")]
    words = ("train", "--task", "classification", "--model", bert, *files, *SHORT, "schedule.steps=1")
    code, _, err = deltasam(*words, "--output", "run")
    assert code == 0
    assert "learning rate 0.0001 (chosen for" in err
    config = RunConfig.read(Path("run/config.yaml"))
    assert config.optimizer.lr == 1e-4
    code, out, err = deltasam("train", "--config", "run/config.yaml", "--output", "run")
    assert "finished already" in out  # the file names the number, so nothing is chosen again
    assert "chosen" not in err
    code, out, err = deltasam(*words, "optimizer.lr=0.003", "--dry-run")
    assert yaml.safe_load(out)["optimizer"]["lr"] == 0.003
    assert "chosen" not in err


@pytest.mark.parametrize("keep", ["results", "checkpoints", None])
def test_what_is_kept_of_a_finished_run(keep: str | None, bert: str, deltasam: Command) -> None:
    files = [f"task.files.{split}=rows.csv" for split in ("train", "validation")]
    options = () if keep is None else ("--keep", keep)
    words = ("train", "--task", "classification", "--model", bert, *files, *SHORT, "schedule.steps=1")
    code, _, err = deltasam(*words, "checkpoint_every=1", *options, "--output", "run")
    assert code == 0, err
    left = {path.name for path in Path("run").iterdir() if path.is_dir()}
    assert left == {"results": set(), "checkpoints": {"model", "checkpoints"}}.get(str(keep), {"model"})


def test_a_resumed_run_says_from_where(bert: str, deltasam: Command, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(step: int, *_: object) -> None:
        if step == 3:
            raise StopError

    plain = {"task": classification_task(tmp_path), "model": bert, "batch": {"size": 8}, "schedule": {"steps": 4}}
    with pytest.raises(StopError):
        run(RunConfig.from_plain({**plain, "checkpoint_every": 1}), Path("run"), watch=stop)
    code, _, err = deltasam("train", "--config", "run/config.yaml", "--output", "run")
    assert code == 0
    assert "resumed from update 2 of 4" in err
    assert "4/4" in err


def test_a_run_that_did_not_learn_says_so_and_what_to_try(bert: str, deltasam: Command) -> None:
    files = [f"task.files.{split}=rows.csv" for split in ("train", "validation")]
    words = ("train", "--task", "classification", "--model", bert, *files, *SHORT, "--output", "run")
    code, out, _ = deltasam(*words, "optimizer.lr=2e-7", "schedule.epochs=3", "--method", "sam")
    assert code == 0
    assert "largest class (0.5000)" in out
    for setting in ("optimizer.lr (now 2e-07)", "schedule.epochs", "method.rho (now 0.01)"):
        assert setting in out
