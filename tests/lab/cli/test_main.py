"""The command line as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import deltasam
from deltasam.lab.cli import main
from deltasam.lab.cli._arguments import arranged
from deltasam.lab.cli._commands import COMMANDS
from deltasam.lab.cli.bench import BenchStep
from deltasam.lab.cli.sweep import SweepCommand
from deltasam.lab.cli.train import Train
from helpers.reports import write_run


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deltasam", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.returncode == 0
    for name, command in COMMANDS.items():
        assert name in result.stdout
        assert command.summary in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert run().stdout == result.stdout


def test_help_on_a_narrow_terminal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2")
    command = [sys.executable, "-m", "deltasam", "train", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "--preset" in result.stdout
    assert result.returncode == 0


def test_a_locale_without_the_signs_of_a_table_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        write_run(tmp_path, "ERM", seed, score=0.8)
        write_run(tmp_path, "DeltaSAM", seed, score=0.7, rho=0.01)
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    result = run("table", "results", str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    assert "0.7000" in result.stdout


@pytest.mark.parametrize("words", [["--help"], ["list", "methods"]])
def test_a_closed_pipe_is_no_error(words: list[str]) -> None:
    command = [sys.executable, "-m", "deltasam", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_version() -> None:
    assert run("--version").stdout.strip() == f"deltasam {deltasam.__version__}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = run(*name.split(), "--help")
    assert result.returncode == 0, result.stderr
    assert f"usage: deltasam {name}" in result.stdout
    for empty in ("(default: )", "(default: None)", "(default: False)", "(default: True)"):
        assert empty not in " ".join(result.stdout.replace("│", " ").split())
    described = COMMANDS[name].load().__doc__
    if "Examples:" in described:  # which tyro omits by default
        first = described.partition("Examples:")[2].strip().splitlines()[0].strip()
        assert first in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        "evaluate --task mirror --set task.pooling=cls --model x --set task.max_length=8",
        "analyze weights runs/a --weightings OwnGradient --weightings Directional",
    ],
)
def test_an_option_with_several_values_is_given_once(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert "is given twice" in capsys.readouterr().err


def test_a_group_alone_lists_its_commands() -> None:
    shown = run("bench", "--help")
    assert shown.returncode == 0
    assert "bench step" in shown.stdout
    assert "list methods" not in shown.stdout.split("\n\n")[1]
    assert run("bench").returncode == 2


@pytest.mark.parametrize(
    ("typed", "meant"), [("evn", "deltasam env"), ("lst", "deltasam list"), ("bench setp", "deltasam bench step")]
)
def test_unknown_command_gets_a_suggestion(typed: str, meant: str) -> None:
    result = run(*typed.split())
    assert result.returncode == 2
    assert f"unknown command '{typed}'" in result.stderr
    assert meant in result.stderr


def test_a_word_like_no_command_gets_no_suggestion() -> None:
    result = run("xyzzy")
    assert result.returncode == 2
    assert "Did you mean" not in result.stderr
    assert "deltasam --help" in result.stderr


def test_unknown_option_gets_a_suggestion() -> None:
    result = run("env", "--jsno")
    assert result.returncode == 2
    assert "--json" in result.stderr + result.stdout


def test_env_prints_versions_as_json() -> None:
    facts = json.loads(run("env", "--json").stdout)
    assert {"python", "platform", "deltasam", "torch", "cuda"} <= set(facts)
    assert facts["deltasam"] == deltasam.__version__


def test_settings_can_be_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    line = "train method.rho=0.2 --task docstrings batch.size=7 --model minilm-l6 --dry-run seed=5 --method sam"
    assert main(line.split()) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["method"]["rho"], shown["batch"]["size"], shown["seed"]) == (0.2, 7, 5)
    words = ["--output", "rho=1", "a.b=2", "--dry-run"]
    assert arranged(Train, words) == ["--output", "rho=1", "--dry-run", "--", "a.b=2"]


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        (Train, ["--show"], ["--dry-run"]),
        (SweepCommand, ["--on", "ray"], ["--backend", "ray"]),
        (SweepCommand, ["--on=ray"], ["--backend=ray"]),
        (BenchStep, ["--no-field"], ["--no-third-party"]),
    ],
)
def test_former_names_of_options_work_with_a_note(
    kind: type, old: list[str], new: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert arranged(kind, old) == new
    old_name, new_name = (words[0].partition("=")[0] for words in (old, new))
    assert f"{old_name} is now called {new_name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rho", "0.1"], "--rho: unknown option; write settings of the run as section.option=value, such as"),
        (["--epochs=4"], "--epochs: unknown option; did you mean schedule.epochs=... (without --)?"),
        (["--settings", "seed=1"], "--settings: unknown option; write settings of the run as"),
        (["--modle=x"], "--modle: unknown option; did you mean --model?"),
        (["--seed", "three"], "invalid literal for int() with base 10: 'three'"),
    ],
)
def test_an_unknown_option_of_train(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["train", "--task", "docstrings", "batch.size=7", *words])
    except SystemExit as stopped:
        code = stopped.code
    shown = capsys.readouterr()
    assert code == 2
    assert message in " ".join((shown.err + shown.out).replace("│", " ").split())
    assert "None" not in shown.err.split("Argument helptext")[0]
    assert "batch.size" not in shown.err


def test_help_does_not_offer_none_as_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "{None}" not in capsys.readouterr().out


def test_shell_completion_of_tyro(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--tyro-print-completion", "bash"])
    assert not stopped.value.code
    assert "--preset" in capsys.readouterr().out
