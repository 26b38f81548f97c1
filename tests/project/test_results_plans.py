"""The committed results: readable, those of the sweep files, at the settings that the tuning runs chose."""

from __future__ import annotations

import json
import runpy

import numpy as np
import pytest

from deltasam.lab.pages.plan import planned
from deltasam.lab.pages.runs import choose, read
from deltasam.lab.report import TABLES, read_runs, to_markdown
from helpers.results import ROOT

RESULTS = ROOT / "results"


def test_every_run_folder_is_readable() -> None:
    runs = read_runs(RESULTS)
    assert [problem for problem in runs.problems() if "measured on another text" not in problem] == []  # see llm.md
    files = {json.loads(path.read_bytes())["run_id"] for path in RESULTS.rglob("result.json")}
    assert {run.run_id for run in runs.finished} == files


def test_the_tables_of_the_command_read_the_committed_runs() -> None:
    for name, folder, value in (("adversarial-risk", "adversarial-risk", "2.47"), ("glue", "glue", "81.9")):
        assert value in to_markdown(TABLES[name](read_runs(RESULTS / folder)))


def test_results_hold_no_weights() -> None:
    kinds = {path.suffix for path in RESULTS.rglob("*") if path.is_file()}
    assert kinds <= {".json", ".md", ".jsonl"}


def test_committed_runs_are_planned() -> None:
    """A change of a sweep, or of the default of an option, must not orphan the existing runs.

    Five runs of FreeLB at its default step size are older than the grid that chooses it.
    """
    known = set(planned(ROOT)["run_id"])
    folders = [path.name for path in RESULTS.iterdir() if path.is_dir() and path.name not in ("weights", "rounding")]
    runs = read(RESULTS, *sorted(folders))
    assert len(runs) > 1_900
    others = runs[~runs["run_id"].isin(known)]
    assert [*zip(others["task"], others["method"], others["adv_lr"], strict=True)] == [("mrpc", "FreeLB", 0.1)] * 5


def test_missing_runs_are_counted() -> None:
    """One seed of one method is missing on QQP, and no run of SST-2 exists for the second encoder."""
    counts = planned(ROOT).groupby(["sweep", "method"])["done"].agg(["size", "sum"])
    assert tuple(counts.loc["minilm-qqp", "per-instance"]) == (5, 4)
    assert counts.loc["minilm-sst2"]["sum"].sum() == 0
    assert (counts.loc["glue"]["size"] == counts.loc["glue"]["sum"]).all()


@pytest.mark.parametrize(
    ("tuned", "fixed", "task"),
    [("minilm-radii", "minilm", "cola"), ("glue-larger-radii-sst2", "glue-larger-sst2", "sst2")],
)
def test_settings_chosen_on_the_task_share_the_runs_at_one_setting(tuned: str, fixed: str, task: str) -> None:
    """On these tasks every method chose the common setting: its runs are made once for both sweeps."""
    final = planned(ROOT).query("kind == 'final' and task == @task")
    ids = set(final[final["sweep"] == tuned]["run_id"])
    assert len(ids) >= 20
    assert ids <= set(final[final["sweep"] == fixed]["run_id"])


def test_runs_that_two_folders_share_are_the_same() -> None:
    """The runs of glue-eta at eta = 1e-4 are copies of those in glue."""
    own, others = RESULTS / "glue-eta", RESULTS / "glue"
    shared = sorted({path.name for path in own.iterdir()} & {path.name for path in others.iterdir()})
    assert len(shared) == 54
    for name in shared:
        assert (own / name / "result.json").read_bytes() == (others / name / "result.json").read_bytes()


def test_the_second_encoder_trains_at_the_learning_rate_that_plain_training_chose() -> None:
    means = read(RESULTS, "lr-minilm").pivot_table(index="task", columns="lr", values="score")
    used = read(RESULTS, "minilm", "minilm-larger").groupby("task")["lr"].unique()
    assert len(used) == 7
    for task, rates in used.items():
        assert len(rates) == 1
        assert means.loc[task, rates[0]] == pytest.approx(means.loc[task].max()), task


def test_other_weights_have_the_radius_chosen_for_delta_sam() -> None:
    tuning = read(RESULTS, "glue").query("tuning")
    used = read(RESULTS, "glue-weightings").groupby("task")["rho"].unique()
    chosen = choose(tuning)
    assert {task: list(rho) for task, rho in used.items()} == {
        task: [dict(chosen[task, "DeltaSAM"])["rho"]] for task in ("cola", "mrpc", "rte", "stsb")
    }


def test_weights_were_measured_on_committed_runs() -> None:
    folder = RESULTS / "weights"
    steps = {run.path.name: run.steps for run in read_runs(folder).finished}
    for path in folder.glob("*.json"):
        for line in json.loads(path.read_text(encoding="utf-8")):
            assert steps[line["run"]] == int(path.stem.rpartition("-")[2])
            assert {len(values) for values in line["by_batch"].values()} == {6}


def test_intervals_contain_the_mean_as_often_as_recorded() -> None:
    """Counted again with fewer draws: 400 of them are within 0.055 of the share (three standard errors)."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "interval_coverage.py"))
    recorded = json.loads(script["FILE"].read_text(encoding="utf-8"))
    random = np.random.default_rng(1)
    assert script["of_a_cell"](5, 400, random) == pytest.approx(recorded["cell"]["5"], abs=0.055)
    assert script["of_several_tasks"](4, 5, 400, random) == pytest.approx(recorded["tasks"]["4"]["5"], abs=0.055)
