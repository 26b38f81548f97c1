"""``deltasam evaluate``: which rows, conditions and settings, the table, the figures, torchao."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deltasam.analysis import calibration, quantized, temperature_scaled
from deltasam.lab.cli import _torchao, main
from deltasam.lab.cli._conditions import by_bits, by_condition
from deltasam.lab.experiments import RunConfig, load_run, run
from helpers.pretrained import bert_folder

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.usefixtures("libraries_speak_again"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was evaluated on four of eight rows, and two other files next to it."""
    place = tmp_path_factory.mktemp("evaluate")
    for name, rows in (("rows", 8), ("other", 6)):
        lines = ["text,label", *(f"{'the cat sat' if i % 2 else 'a dog ran'} {i},{i % 2}" for i in range(rows))]
        (place / f"{name}.csv").write_text("\n".join(lines))
    files = dict.fromkeys(("train", "validation"), str(place / "rows.csv"))
    task = {"name": "classification", "files": files, "max_length": 16, "eval_rows": 4, "bits": []}
    plain = {"task": task, "model": str(bert_folder(place / "bert")), "batch": {"size": 8}, "schedule": {"steps": 1}}
    run(RunConfig.from_plain({**plain, "checkpoint_every": "never"}), place / "run")
    return place / "run"


def evaluated(capsys: pytest.CaptureFixture[str], *words: Any) -> dict[str, Any]:
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_whole_split_unless_rows_are_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluated(capsys, folder)["rows"] == 8
    assert evaluated(capsys, folder, "--rows", 3)["rows"] == 3
    given = ["--task", "classification", "--model", folder / "model", "task.eval_rows=5"]
    files = [f"task.files.{split}={folder.parent / 'rows.csv'}" for split in ("train", "validation")]
    assert evaluated(capsys, *given, *files, "--bits")["rows"] == 5


def test_a_damaged_result_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is measured: an evaluation may take long."""
    copy = shutil.copytree(folder, tmp_path / "run")
    (copy / "result.json").write_text('{"a":')
    assert main(["evaluate", str(copy)]) == 2
    error = capsys.readouterr().err
    assert "result.json: not a result of this version" in error
    assert "Traceback" not in error


def test_settings_as_in_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = f"task.files.test={folder.parent / 'other.csv'}"
    for words in ([folder, setting], [setting, folder], [folder, "--set", setting]):
        found = evaluated(capsys, *words, "--split", "test")
        assert (found["rows"], Path(found["origin"]).name) == (6, "other.csv")
    assert main(["evaluate", str(folder), str(folder)]) == 2
    assert "give one run folder" in capsys.readouterr().err


def test_bits_are_those_asked_for_and_those_of_the_library(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not [name for name in evaluated(capsys, folder)["metrics"] if "bit" in name]
    found = evaluated(capsys, folder, "--bits", 2)["metrics"]
    assert sorted(name for name in found if name.startswith("nll_") and "bit" in name) == [
        "nll_2bit",
        "nll_2bit_channel",
        "nll_scaled_2bit",
        "nll_scaled_2bit_channel",
    ]
    _, loaded = load_run(folder, rows="all")
    for suffix, group in (("", 64), ("_channel", None)):
        with quantized(loaded.model, 2, group=group):
            expected = loaded.task.evaluate(loaded.model, loaded.tokenizer, loaded.rows)["loss"]
            logits, _ = loaded.task.outputs(loaded.model, loaded.tokenizer, loaded.rows)
        assert found[f"nll_2bit{suffix}"] == pytest.approx(expected, rel=1e-5)
        labels = loaded.task.labels(loaded.rows)
        scaled = calibration(temperature_scaled(logits, labels), labels, resamples=1000)
        assert found[f"nll_scaled_2bit{suffix}"] == pytest.approx(scaled.nll, rel=1e-5)
        interval = (found[f"ece_low_scaled_2bit{suffix}"], found[f"ece_high_scaled_2bit{suffix}"])
        assert interval == pytest.approx(scaled.ece_interval, rel=1e-4)
    assert found["nll_2bit"] != found["nll"]


def test_a_table_with_a_row_per_condition_and_figures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(folder.parent / "other.csv")
    words = ["evaluate", str(folder), "--bits", "4", "--on", other, "--figures", str(tmp_path / "new/pictures")]
    assert main(words) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split() == ["condition", "accuracy", "f1", "NLL", "Brier", "ECE", "95%", "interval"]
    starts = ["as trained", "temperature-scaled", f"on {other}", f"on {other}, temperature-scaled",
              "4 bits, groups of 64", "4 bits, groups of 64, temperature-scaled", "4 bits, channels",
              "4 bits, channels, temperature-scaled"]  # fmt: skip
    assert [line.split("  ")[0] for line in lines[1:9]] == starts
    assert all(line.endswith("]") for line in lines[1:9])
    assert "8 rows of" in lines[-1]
    for name, text in (("reliability.svg", "temperature"), ("bits.svg", "bits")):
        assert (tmp_path / "new/pictures" / name).stat().st_size > 2000, text
        assert str(tmp_path / "new/pictures" / name) in shown.err


def test_other_sets_and_bits_that_cannot_be_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in ((["--on", "mrpc"], "2 texts"), (["--bits", "0"], "bits"), (["--on", "mrcp"], "mrpc")):
        assert main(["evaluate", str(folder), *words]) == 2
        assert message in capsys.readouterr().err


def test_torchao_that_is_missing_is_skipped_in_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_torchao, "find_spec", lambda name: None)
    assert main(["evaluate", str(folder), "--torchao"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("torchao skipped: not installed: pip install 'deltasam[torchao]'") == 1
    assert "as trained" in shown.out


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
def test_torchao_rounds_a_little(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(folder), "--torchao", "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)["metrics"]
    assert found["nll_torchao_int8"] == pytest.approx(found["nll"], abs=0.1)
    assert found["nll_torchao_int8"] != found["nll"]
    assert "torchao skipped: int4 is not supported here" in shown.err, "the model is narrower than a group"


def test_names_of_metrics_are_taken_apart() -> None:
    metrics = {"loss": 1.0, "general_nll_before": 2.0, "ece_scaled_on_mnli:validation_mismatched": 3.0}
    metrics |= {"accuracy_scaled_8bit": 7.0, "nll_scaled_torchao_int4": 8.0}
    metrics |= {"accuracy": 0.9, "accuracy_3bit_channel": 4.0, "accuracy_8bit": 5.0, "accuracy_torchao_int4": 6.0}
    assert by_condition(metrics) == {
        "as trained": {"loss": 1.0, "general_nll_before": 2.0, "accuracy": 0.9},
        "on mnli:validation_mismatched, temperature-scaled": {"ece": 3.0},
        "8 bits, groups of 64, temperature-scaled": {"accuracy": 7.0},
        "torchao, int4, temperature-scaled": {"nll": 8.0},
        "3 bits, channels": {"accuracy": 4.0},
        "8 bits, groups of 64": {"accuracy": 5.0},
        "torchao, int4": {"accuracy": 6.0},
    }
    assert by_bits(metrics, "accuracy") == {"channels": {32: 0.9, 3: 4.0}, "groups of 64": {32: 0.9, 8: 5.0}}
    assert by_bits(metrics, "loss") == {}
