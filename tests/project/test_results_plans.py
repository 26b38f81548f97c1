"""The committed results are those of the sweep files, and what these still want is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deltasam.lab.report import read_runs
from deltasam.lab.sweeps import final_runs, read_sweep, tuning_runs
from helpers.results import ROOT, SWEEPS, script, write_run

LARGER = ("nli", "qqp", "sst2")


def planned_ids(name: str) -> set[str]:
    """Every run that a sweep can come to, whatever it chooses."""
    sweep = read_sweep(SWEEPS / f"{name}.yaml")
    if sweep.tune is None:
        return {run.config.run_id for run in final_runs(sweep, {})}
    tuning = tuning_runs(sweep)
    points: dict[tuple[str, str], list[Any]] = {}
    for run in tuning:
        points.setdefault((run.setup, run.method), []).append(run.point)
    found = {run.config.run_id for run in tuning}
    for which in range(max(map(len, points.values()))):
        chosen = {cell: tried[min(which, len(tried) - 1)] for cell, tried in points.items()}
        found |= {run.config.run_id for run in final_runs(sweep, chosen)}
    return found


COMMITTED = {
    "glue": ("glue",),
    "glue-larger": tuple(f"glue-larger-{name}" for name in (*LARGER, *(f"radii-{name}" for name in LARGER))),
    "glue-weightings": ("glue-weightings-0.01", "glue-weightings-0.02"),
    "lr-minilm": ("lr-minilm", "lr-minilm-sst2"),
    "minilm": ("minilm", "minilm-stsb", "minilm-radii", "minilm-radii-stsb"),
    "minilm-larger": tuple(f"minilm-{task}" for task in ("qnli", "mnli", "qqp", "sst2")),
    "summarization": ("summarization", "summarization-untrained"),
}
LARGE = ("glue", "glue-larger", "minilm", "minilm-larger")


@pytest.mark.parametrize(
    "folder", [pytest.param(each, marks=pytest.mark.slow) if each in LARGE else each for each in COMMITTED]
)
def test_committed_runs_are_planned(folder: str) -> None:
    """A change of a sweep, or of an option's default, must not make the runs that are there worthless."""
    planned = {run_id for name in COMMITTED[folder] for run_id in planned_ids(name)}
    runs = read_runs(ROOT / "results" / folder).finished
    assert runs
    assert [run.path.name for run in runs if run.run_id not in planned] == []


@pytest.mark.parametrize(
    "name", [*(f"glue-larger-radii-{name}" for name in LARGER), "minilm-radii", "minilm-radii-stsb"]
)
def test_settings_chosen_on_the_task_share_the_runs_at_one_setting(name: str) -> None:
    """The final runs of the grid's first points, and plain training, are made once for both sweeps."""
    sweep = read_sweep(SWEEPS / f"{name}.yaml")
    first: dict[tuple[str, str], Any] = {}
    for run in tuning_runs(sweep):
        first.setdefault((run.setup, run.method), run.point)
    assert {run.config.run_id for run in final_runs(sweep, first)} <= planned_ids(name.replace("-radii", ""))


def test_the_second_encoder_trains_at_the_learning_rate_that_plain_training_chose() -> None:
    tried, primary = read_runs(ROOT / "results" / "lr-minilm").finished, script("common")["primary"]
    used: dict[str, set[float]] = {}
    for name in ("minilm", *(f"minilm-{task}" for task in ("stsb", "qnli", "mnli", "qqp", "sst2"))):
        for planned in final_runs(read_sweep(SWEEPS / f"{name}.yaml"), {}):
            used.setdefault(planned.config.task.name, set()).add(planned.config.optimizer.lr)
    assert set(used) == {run.task for run in tried}
    for task, rates in used.items():
        scores: dict[float, list[float]] = {}
        for run in tried:
            if run.task == task:
                scores.setdefault(dict(run.settings)["lr"], []).append(primary(run))
        (rate,) = rates
        assert sum(scores[rate]) == pytest.approx(max(map(sum, scores.values()))), task


def test_missing_runs_shrink_with_the_results(tmp_path: Path) -> None:
    missing = script("missing")
    sweep = yaml.safe_load((SWEEPS / "glue.yaml").read_text())
    for seed in sweep["seeds"]:
        write_run(tmp_path, "rte", seed=seed, metrics={"accuracy": 0.6})
    write_run(tmp_path, "rte", {"name": "SAM", "rho": 0.02}, seed=101, metrics={"accuracy": 0.6}, split="train[90%:]")
    write_run(tmp_path, "rte", {"name": "SAM", "rho": 0.02}, seed=1, metrics={"accuracy": 0.6})
    write_run(tmp_path, "rte", {"name": "SAM", "rho": 0.01}, seed=2, metrics={"accuracy": 0.6})  # not the chosen one
    found = missing["missing_runs"](sweep, tmp_path)
    assert "erm" not in found["rte"]
    assert found["rte"]["sam"] == (1, 10)
    assert found["rte"]["delta-sam"] == (0, 10)
    assert found["mrpc"]["erm"] == (0, 10)
    text = missing["told"](found, tasks=4, methods=8)
    assert "MRPC, STS-B, CoLA: all methods" in text
    assert "9 of 10 seeds of sam" in text


def test_an_option_that_the_grid_sets_is_no_reason_to_miss_a_run(tmp_path: Path) -> None:
    sweep = yaml.safe_load((SWEEPS / "sts.yaml").read_text())
    method = {"name": "SAM", "rho": 0.1}  # the sweep file says 0.02, and its grid has 0.1
    settings: dict[str, Any] = {"metrics": {"sts_average": 0.6}, "epochs": 1, "lr": 5e-5}
    write_run(tmp_path, "mirror", method, seed=101, split="validation", **settings)
    for seed in sweep["seeds"]:
        write_run(tmp_path, "mirror", method, seed=seed, split="test", **settings)
    found = script("missing")["missing_runs"](sweep, tmp_path)
    assert "mirror-sam" not in found["mirror"]
    assert found["mirror"]["mirror-delta-sam"] == (0, 5)


def test_every_radius_of_a_grid_that_chooses_nothing_is_missed_by_itself(tmp_path: Path) -> None:
    sweep = yaml.safe_load((SWEEPS / "radius-cola.yaml").read_text())
    for seed in sweep["seeds"]:
        write_run(tmp_path, "cola", {"name": "SAM", "rho": 0.005}, seed=seed, metrics={"matthews": 0.2})
    found = script("missing")["missing_runs"](sweep, tmp_path)["cola"]
    assert "sam at 0.005" not in found
    assert found["sam at 0.002"] == found["delta-sam at 0.005"] == (0, 10)


def test_runs_on_a_sample_are_not_those_on_all_rows(tmp_path: Path) -> None:
    sweep = yaml.safe_load((SWEEPS / "glue-larger-sst2.yaml").read_text())
    for seed in sweep["seeds"]:
        write_run(tmp_path, "sst2", seed=seed, metrics={"accuracy": 0.9}, epochs=1, lr=2e-4)
    missing = script("missing")["missing_runs"]
    assert "erm" not in missing(sweep, tmp_path)["sst2"]
    assert missing({**sweep, "tasks": [{"name": "sst2", "train_rows": 20_000}]}, tmp_path)["sst2"]["erm"] == (0, 5)


def test_other_weights_have_the_radius_chosen_for_delta_sam() -> None:
    tuning = [run for run in read_runs(ROOT / "results" / "glue").finished if run.split.endswith("]")]
    chosen = script("common")["chosen_points"](tuning)
    found = {
        planned.config.task.name: planned.config.method.rho  # type: ignore[attr-defined]
        for path in SWEEPS.glob("glue-weightings-*.yaml")
        for planned in final_runs(read_sweep(path), {})
    }
    assert found == {task: dict(chosen[task, "DeltaSAM"])["rho"] for task in ("mrpc", "rte", "stsb", "cola")}
