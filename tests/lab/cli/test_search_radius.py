"""``deltasam search radius``: trains, shows a table, and ends with the choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deltasam.lab import sweeps
from deltasam.lab.cli import main
from deltasam.lab.cli.search_radius import verdict
from deltasam.lab.sweeps import choose_radius
from helpers.folders import classification_task
from helpers.pools import InThisProcess
from helpers.pretrained import bert_folder

Search = Callable[..., tuple[int, str, str]]


@pytest.fixture
def search(
    libraries_speak_again: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Search:
    """The command on a tiny task and model."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sweeps, "LocalPool", InThisProcess)
    task = classification_task(tmp_path, rows=30)
    bert_folder(tmp_path / "bert")
    options = ["--task", "classification", "--model", str(tmp_path / "bert"), "--output", str(tmp_path / "out")]
    settings = [f"task.{name}={json.dumps(value)}" for name, value in task.items() if name != "name"]
    settings += ["batch.size=8", "schedule.steps=1", "evaluate_every=end", "checkpoint_every=never"]

    def run(*words: object) -> tuple[int, str, str]:
        code = main(["search", "radius", *options, *map(str, words), *settings])
        return code, *capsys.readouterr()

    return run


def test_it_trains_chooses_and_resumes(search: Search, tmp_path: Path) -> None:
    code, text, _ = search("--radii", 0.01, 0.3, "--seeds", 1, "--dry-run")
    assert code == 0
    assert [line.split()[::2] for line in text.splitlines()[:3]] == [
        ["missing", "plain"], ["missing", "rho=0.01"], ["missing", "rho=0.3"]
    ]  # fmt: skip
    code, text, err = search("--radii", 0.01, "--seeds", 1)
    assert code == 0, text + err
    assert "with 1 seed, nothing can be said about how sure this is. Settings: method" in text.splitlines()[-1]
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/result.json")}
    assert len(made) == 2

    code, text, err = search("--radii", 0.01, "--seeds", 2)
    assert code == 0, text + err
    assert {path: path.stat().st_mtime_ns for path in made} == made  # not repeated
    results = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/result.json")]
    assert sorted((found["method"], found["seed"]) for found in results) == [
        ("ERM", 42), ("ERM", 43), ("SAM", 42), ("SAM", 43)
    ]  # fmt: skip
    assert {(found["train_rows"], found["eval_rows"]) for found in results} == {(27, 3)}
    written = json.loads((tmp_path / "out" / "radius.json").read_text())
    assert [row["rho"] for row in written["scores"]] == [0.0, 0.01]
    values = {(found["method"], str(found["seed"])): found["primary_value"] for found in results}
    for row, method in zip(written["scores"], ("ERM", "SAM"), strict=True):
        assert row["values"] == {seed: values[method, seed] for seed in ("42", "43")}
    scores = {row["rho"]: list(row["values"].values()) for row in written["scores"]}
    assert written["choice"] == vars(choose_radius(scores))
    assert written["seeds"] == [42, 43]
    assert written["settings"] in text.splitlines()[-1]
    assert text.splitlines()[-1] == verdict(choose_radius(scores), scores)
    assert "difference to plain" in text


def test_a_run_that_fails_and_wrong_options(search: Search) -> None:
    code, text, err = search(
        "--radii", 0.01, "--seeds", 1, "batch.drop_last=true", "batch.eval_size=8", "--holdout", 0.9
    )
    assert code == 1  # three rows of training data leave no batch of eight
    assert "leaves no batch" in text
    assert "plain training failed or diverged, so no radius can be chosen" in err
    for words, message in (
        (("--radii", -1), "radii=-1.0 must be a number in (0, inf)"),
        (("--method", "erm"), "ERM has no radius rho to search"),
        (("--jobs", 0), "--jobs 0: must be at least 1"),
    ):
        code, _, err = search(*words)
        assert code == 2
        assert message in err


@pytest.mark.parametrize(
    ("scores", "choice", "sure", "settings"),
    [
        (
            {0.0: [80.0, 81.0], 0.01: [82.0, 83.0], 0.02: [82.3, 82.9]},
            "rho = 0.01, the smallest radius within one standard error of the best (0.02)",
            "it beats plain training in 100% and all others in 25% of 4 resamples of 2 seeds",
            "method.rho=0.01",
        ),
        (
            {0.0: [80.0, 81.0], 0.01: [82.0, 83.0]},
            "rho = 0.01 is best, and the largest that was tried",
            "it beats plain training in 100% and all others in 100% of 4 resamples of 2 seeds",
            "method.rho=0.01",
        ),
        (
            {0.0: [80.0, 82.0], 0.01: [79.0, 82.0]},
            "Plain training is best: no radius has a better mean",
            "it beats all radii in 75% of 4 resamples of 2 seeds",
            "method=ERM",
        ),
    ],
)
def test_the_last_line(scores: dict[float, list[float]], choice: str, sure: str, settings: str) -> None:
    assert verdict(choose_radius(scores), scores) == f"{choice}; {sure}. Settings: {settings}"
