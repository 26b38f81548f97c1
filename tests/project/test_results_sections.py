"""The sections of the page of results appear with their results, and say what made-up results say."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltasam.experiments.sweeps import final_runs, read_sweep, tuning_runs
from deltasam.report import read_runs

ROOT = Path(__file__).parents[2]
SWEEPS = ROOT / "configs" / "sweeps" / "evidence"


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / f"results_{name}.py"))


def write_run(
    folder: Path,
    task: str,
    method: dict[str, Any] | None = None,
    *,
    seed: int,
    metrics: dict[str, float],
    split: str = "validation",
    epochs: float = 3,
    lr: float = 1e-4,
    regularisers: Sequence[dict[str, Any]] = (),
    risk: float | None = None,
) -> None:
    """A result.json with what the page reads."""
    own = {"name": "ERM", **(method or {})}
    primary = next(iter(metrics))
    config = {
        "task": {"name": task, "eval_split": split, "train_rows": None}, "method": own,
        "regularisers": list(regularisers), "optimizer": {"lr": lr}, "schedule": {"epochs": epochs, "steps": None},
        "seed": seed,
    }  # fmt: skip
    name = "+".join([own["name"], *(each["name"] for each in regularisers)])
    place = folder / f"run-{len(list(folder.glob('run-*'))) if folder.is_dir() else 0}"
    place.mkdir(parents=True)
    result = {
        "run_id": str(place), "task": task, "model": "bert-small-wiki", "method": name, "seed": seed,
        "primary_metric": primary, "higher_is_better": True, "best_value": metrics[primary] + 0.01,
        "metrics": metrics, "steps": 10, "train_rows": 492, "eval_rows": 256, "train_seconds": 1.0,
        "forward_passes": 10, "backward_passes": 10, "peak_memory_bytes": 1, "device": "cpu", "config": config,
    }  # fmt: skip
    (place / "result.json").write_text(json.dumps(result))
    if risk is not None:
        (place / "analysis").mkdir()
        (place / "analysis" / "adversarial-risk.json").write_text(json.dumps({"value": risk}))


def cells(page: str, first: str) -> list[list[str]]:
    """The rows of tables that begin with this cell."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:1] == "|"]
    return [row for row in rows if row[0] == first]


def test_no_results_no_sections(tmp_path: Path) -> None:
    page = script("page")["page"](tmp_path)
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == ["## Not measured yet"]
    for name in script("missing")["SWEEPS"]:
        assert f"`configs/sweeps/evidence/{name}.yaml`" in page


def test_risk_has_a_row_for_every_radius_weighting_and_length(tmp_path: Path) -> None:
    folder = tmp_path / "adversarial-risk"
    for seed in range(1, 11):
        noise = (seed + seed % 2) / 1000
        for method, epochs, risk, score in (
            (None, 3, 2.0, 0.8), ({"name": "SAM", "rho": 0.05}, 3, 1.0, 0.7),
            ({"name": "PerInstanceSAM", "rho": 0.05}, 3, 0.5, 0.6),
            ({"name": "PerInstanceSAM", "rho": 0.05}, 6, 0.4, 0.65),
            ({"name": "PerInstanceSAM", "rho": 0.01}, 3, 0.9, 0.75),
            ({"name": "DeltaSAM", "rho": 0.05, "weighting": {"name": "OwnGradient"}}, 3, 0.8, 0.72),
        ):  # fmt: skip
            write_run(folder, "rte", method, seed=seed, metrics={"accuracy": score + noise}, risk=risk, epochs=epochs)
    text = script("risk")["risk_section"](tmp_path)
    assert "### RTE" in text
    assert "### MRPC" not in text
    names = [line.split(" | ")[0][2:] for line in text.splitlines() if line.startswith("| ")]
    assert names[1:7] == [
        "ERM", "SAM", "δ-SAM, weights along own gradients", "per-instance SAM", "per-instance SAM, twice as long",
        "per-instance SAM, rho = 0.01",
    ]  # fmt: skip
    (longer,) = cells(text, "per-instance SAM, twice as long")
    assert longer[1:3] == ["10", "0.40 [0.40, 0.40]"]
    assert longer[4] == "65.6 / 66.0"
    assert longer[-1] == "0.65; 70.0 / 71.5", "the paper's per-instance runs were twice as long"
    (difference,) = cells(text, "per-instance SAM, rho = 0.01 - SAM")
    # 10 pairs, all of one sign: 2 / 2^10, and four methods are compared with SAM.
    assert difference[1:] == ["-0.10 [-0.10, -0.10] (n = 10, p = 0.0078)", "5.00 [5.00, 5.00] (n = 10, p = 0.0078)"]


def glue_runs(folder: Path) -> None:
    for rho, score in ((0.01, 0.70), (0.02, 0.75)):
        for seed in (101, 102):
            metrics = {"accuracy": score}
            write_run(folder, "rte", {"name": "SAM", "rho": rho}, seed=seed, metrics=metrics, split="train[90%:]")
            write_run(folder, "rte", {"name": "DeltaSAM", "rho": rho}, seed=seed, metrics=metrics, split="train[90%:]")
    for seed in (1, 2, 3, 4, 5, 6):
        write_run(folder, "rte", seed=seed, metrics={"accuracy": 0.6 + seed / 100})
        # Better on the development set at the radius that training data did not choose: must not be reported.
        write_run(folder, "rte", {"name": "SAM", "rho": 0.01}, seed=seed, metrics={"accuracy": 0.9})
        write_run(folder, "rte", {"name": "SAM", "rho": 0.02}, seed=seed, metrics={"accuracy": 0.62 + seed / 100})


def test_glue_reports_the_settings_chosen_on_training_data(tmp_path: Path) -> None:
    glue_runs(tmp_path / "glue")
    for rho, score in ((0.01, 0.9), (0.02, 0.61)):
        own = {"name": "DeltaSAM", "rho": rho, "weighting": {"name": "Directional"}}
        write_run(tmp_path / "glue-weightings", "rte", own, seed=1, metrics={"accuracy": score})
    # Plain training of the other table counts, at the same number of epochs.
    write_run(tmp_path / "adversarial-risk", "rte", seed=7, metrics={"accuracy": 0.6}, risk=1.0)
    write_run(tmp_path / "adversarial-risk", "rte", seed=8, metrics={"accuracy": 0.6}, risk=1.0, epochs=6)
    glue = script("glue")
    text = glue["glue_section"](tmp_path)
    assert cells(text, "ERM")[0][1].endswith("]"), "of most seeds"
    assert "\n\n7 seeds, but where a cell says n.\n" in text
    found = cells(text, "SAM")
    assert found[0][1].startswith("65.5 [64.")
    assert found[0][1].endswith("(n = 6)")
    assert found[1][1] == "65.5 / 68.0"
    assert found[2][1] == "68.0 (69.3)", "the best of seeds 1 to 5, each at its best epoch, beside the paper's"
    assert cells(text, "δ-SAM, directional weights")[0][1] == "61.0 (n = 1)"
    assert cells(text, "SAM - ERM")[0][1] == "2.00 [2.00, 2.00] (n = 6, p = 0.062)", "two methods against ERM"
    chosen = [row for row in cells(glue["tuning_section"](tmp_path), "SAM") if "**" in row[2]]
    assert chosen == [["SAM", "rho = 0.02", "**75.0**"]]


def test_larger_tasks_are_called_subsets(tmp_path: Path) -> None:
    write_run(tmp_path / "glue-larger", "sst2", seed=1, metrics={"accuracy": 0.9}, epochs=1)
    text = script("glue")["larger_section"](tmp_path)
    assert "**Subsets**" in text
    assert "SST-2 on all 67,349 rows" in text


def test_all_tasks_together_count_the_same(tmp_path: Path) -> None:
    for task, folder, metric, gain, seeds in (
        ("cola", "glue", "matthews", 0.04, (1, 2, 3, 4, 5, 6)), ("rte", "glue", "accuracy", 0.01, (1, 2, 3, 4)),
        ("qnli", "glue-larger", "accuracy", -0.02, (1, 2)),
    ):  # fmt: skip
        for seed in seeds:
            score = 0.5 + seed / 100
            write_run(tmp_path / folder, task, seed=seed, metrics={metric: score})
            write_run(tmp_path / folder, task, {"name": "SAM", "rho": 0.01}, seed=seed, metrics={metric: score + gain})
    text = script("pooled")["pooled_section"](tmp_path)
    (row,) = cells(text, "SAM - ERM")
    assert row[1] == "3"
    assert row[2].startswith("1.00 [1.00, 1.00] (p = "), "the mean of 4, 1 and -2 points"
    assert row[3].startswith("-0.50 [-0.50, -0.50] (p = ")
    assert row[4] == "2 of 3"
    drawn = script("pooled")["plots"](tmp_path)["pooled.svg"]
    assert "SAM - ERM, all tasks: 1.00 [1.00, 1.00]" in drawn
    assert "SAM - ERM, without CoLA: -0.50 [-0.50, -0.50]" in drawn


@pytest.mark.parametrize(
    ("folder", "sweeps"),
    [
        ("glue-larger", ("glue-larger-nli", "glue-larger-qqp", "glue-larger-sst2")),
        ("glue-weightings", ("glue-weightings-0.01", "glue-weightings-0.02")),
        ("summarization", ("summarization", "summarization-untrained")),
    ],
)
def test_committed_runs_are_planned(folder: str, sweeps: Sequence[str]) -> None:
    planned = {run.config.run_id for name in sweeps for run in final_runs(read_sweep(SWEEPS / f"{name}.yaml"), {})}
    runs = read_runs(ROOT / "results" / folder).finished
    assert runs
    assert [run.path.name for run in runs if run.run_id not in planned] == []


def test_the_second_encoder_is_compared_with_its_own_plain_training(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / "minilm", "cola", seed=seed, metrics={"matthews": 0.2})
        write_run(tmp_path / "minilm", "cola", {"name": "SAM", "rho": 0.01}, seed=seed, metrics={"matthews": 0.25})
    text = script("glue")["second_encoder_section"](tmp_path)
    assert "learning rate 0.0001" in text
    assert cells(text, "SAM - ERM")[0][1].startswith("5.00 ")


def test_committed_runs_of_the_second_encoder_are_those_of_its_sweeps() -> None:
    for name in ("lr-minilm", "minilm"):
        planned = {run.config.run_id for run in final_runs(read_sweep(SWEEPS / f"{name}.yaml"), {})}
        runs = read_runs(ROOT / "results" / name).finished
        assert {run.run_id for run in runs} == planned


def test_the_second_encoder_trains_at_the_learning_rate_that_plain_training_chose() -> None:
    tried, primary = read_runs(ROOT / "results" / "lr-minilm").finished, script("common")["primary"]
    used: dict[str, set[float]] = {}
    for name in ("minilm", "minilm-stsb"):
        for planned in final_runs(read_sweep(SWEEPS / f"{name}.yaml"), {}):
            used.setdefault(planned.config.task.name, set()).add(planned.config.optimizer.lr)
    assert set(used) == {run.task for run in tried}
    for task, rates in used.items():
        scores: dict[float, list[float]] = {}
        for run in tried:
            if run.task == task:
                scores.setdefault(dict(run.settings)["lr"], []).append(primary(run))
        assert rates == {max(scores, key=lambda lr: sum(scores[lr]))}, task


def test_labels_have_a_row_for_every_weighting_and_model(tmp_path: Path) -> None:
    folder = tmp_path / "weights-by-label"
    folder.mkdir()
    for updates in (60, 20):
        lines = {"with_loss": [0.1, 0.3], "by_label": {"0": [1.5, 1.5], "1": [0.8, 0.8]}}
        record = {
            "updates": updates, "rows": 64, "batch": 32, "rho": 0.01, "device": "cpu", "commit": "0123456789",
            "weightings": {"FiniteDifference": lines, "RandomWeights": lines},
        }  # fmt: skip
        (folder / f"cola-erm-{updates}.json").write_text(json.dumps(record))
    text = script("labels")["labels_section"](tmp_path)
    assert [row[1] for row in cells(text, "20")] == ["Eq. 5", "Eq. 5, shuffled"]
    assert text.index("| 20 |") < text.index("| 60 |")
    assert cells(text, "60")[0][2].startswith("0.20 [")
    assert "commit 0123456" in text


def test_sts_shows_the_chosen_radius_beside_the_paper(tmp_path: Path) -> None:
    sets = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sickr")

    def metrics(value: float) -> dict[str, float]:
        return {"sts_average": value, **dict.fromkeys(sets, value)}

    folder = tmp_path / "sts"
    for rho, score in ((0.02, 0.5), (0.1, 0.7)):
        own = {"name": "SAM", "rho": rho}
        write_run(folder, "mirror", own, seed=101, metrics={"sts_average": score}, split="validation")
    for seed in range(1, 6):
        write_run(folder, "mirror", seed=seed, metrics=metrics(0.6 + seed / 100), split="test")
        write_run(folder, "mirror", {"name": "SAM", "rho": 0.1}, seed=seed, metrics=metrics(0.7), split="test")
    write_run(folder, "mirror", seed=1, metrics=metrics(0.4), split="test", lr=0.0)
    text = script("other")["sts_section"](tmp_path)
    assert cells(text, "without training")[0][2:5] == ["1", "40.00", "40.00"]
    assert cells(text, "Mirror-BERT")[0][2] == "5", "the untrained encoder is not one of the seeds"
    (sam,) = cells(text, "SAM")
    assert sam[1:3] == ["rho = 0.1", "5"]
    assert sam[-1] == "75.50"
    (difference,) = cells(text, "SAM - Mirror-BERT")
    assert difference[1].startswith("7.00 [")
    assert difference[1].endswith("(n = 5, p = 0.062)")


def test_summarization_says_how_small_it_is(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        for regularisers, score in (((), 0.3), (({"name": "R3F"},), 0.31)):
            metrics = {"rouge1": score, "rouge2": 0.1, "rougeLsum": 0.2, "words": 40.0}
            folder = tmp_path / "summarization"
            write_run(folder, "cnn_dailymail", seed=seed, metrics=metrics, regularisers=regularisers)
    text = script("other")["summarization_section"](tmp_path)
    assert "trained for 10 updates on 492 articles, evaluated on 256" in text
    assert cells(text, "R3F")[0][2:4] == ["3", "31.00 [31.00, 31.00]"]
    assert cells(text, "R3F - ERM")[0][1] == "1.00 [1.00, 1.00] (n = 3, p = 0.25)"


def test_running_times_from_the_files_of_bench_train(tmp_path: Path) -> None:
    train = pytest.importorskip("deltasam.bench.train")
    seconds = {"sam": 60.0, "delta-sam": 90.0}

    def run(each: Any, number: int) -> Any:
        took = seconds[each.method] / (1 if each.way == "eager" else 3)
        return train.Trained(
            train_seconds=took, seconds_per_update=took / 100, updates=100, forwards=1, backwards=1, skipped=0,
            metric="accuracy", value=0.5, peak_bytes=1, device="a GPU",
        )  # fmt: skip

    plan = [train.Training(method, way) for way in ("eager", "captured") for method in seconds]
    options = {"task": "rte", "model": "m", "precision": "tf32", "epochs": 3.0, "steps": None, "batch": 32,
               "repeats": 1, "seed": 1, "settings": ["batch.size=32"]}  # fmt: skip
    report = train.measure(plan, run, repeats=1, options=options, machine={"torch": "2"})
    train.write_json(report, tmp_path / "times" / "rte.json")
    text = script("times")["times_section"](tmp_path)
    row = next(row for row in cells(text, "RTE") if row[1] == "δ-SAM")
    assert row[2:] == ["100", "1.500", "1.50", "0.500", "1.50", "0.33", "16", "1.07"]
    assert "deltasam bench train rte batch.size=32 --model m --epochs 3 --precision tf32" in text
    assert "Running times" not in script("page")["page"](tmp_path).partition("## Not measured yet")[2]


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


def test_radii_are_compared_at_the_same_radius(tmp_path: Path) -> None:
    assert script("radius")["radius_section"](tmp_path) == ""
    weighting = {"name": "FiniteDifference"}
    for seed in (1, 2, 3):
        write_run(tmp_path / "glue", "cola", seed=seed, metrics={"matthews": 0.2})
        write_run(tmp_path / "glue", "cola", {"name": "SAM", "rho": 0.01}, seed=seed, metrics={"matthews": 0.1})
        for name, value in (("SAM", 0.3), ("DeltaSAM", 0.34)):
            method = {"name": name, "rho": 0.005, **({"weighting": weighting} if name == "DeltaSAM" else {})}
            write_run(tmp_path / "radius-cola", "cola", method, seed=seed, metrics={"matthews": value})
    text = script("radius")["radius_section"](tmp_path)
    assert cells(text, "method")[0][1:] == ["rho = 0.005", "rho = 0.01"]
    assert [value.partition(" ")[0] for value in cells(text, "SAM")[0][1:]] == ["30.0", "10.0"]
    assert [value.partition(" ")[0] for value in cells(text, "SAM - ERM")[0][1:]] == ["10.00", "-10.00"]
    assert [value.partition(" ")[0] for value in cells(text, "δ-SAM - SAM")[0][1:]] == ["4.00", "-"]
    assert list(script("radius")["plots"](tmp_path)) == ["radius.svg"]


def test_committed_runs_are_runs_of_the_sweep() -> None:
    """A change of a sweep, or of an option's default, must not make the runs that are there worthless."""
    sweep = read_sweep(SWEEPS / "glue.yaml")
    tuning = tuning_runs(sweep)
    points: dict[tuple[str, str], list[Any]] = {}
    for run in tuning:
        points.setdefault((run.setup, run.method), []).append(run.point)
    planned = {run.config.run_id for run in tuning}
    for which in range(0, 6, 2):  # three points of every grid, two seeds each
        chosen = {cell: of_cell[which] for cell, of_cell in points.items()}
        planned |= {run.config.run_id for run in final_runs(sweep, chosen)}
    runs = read_runs(ROOT / "results" / "glue").finished
    assert runs
    assert [run.path.name for run in runs if run.run_id not in planned] == []


def test_other_weights_have_the_radius_chosen_for_delta_sam() -> None:
    tuning = [run for run in read_runs(ROOT / "results" / "glue").finished if run.split.endswith("]")]
    chosen = script("common")["chosen_points"](tuning)
    found = {
        planned.config.task.name: planned.config.method.rho  # type: ignore[attr-defined]
        for path in SWEEPS.glob("glue-weightings-*.yaml")
        for planned in final_runs(read_sweep(path), {})
    }
    assert found == {task: dict(chosen[task, "DeltaSAM"])["rho"] for task in ("mrpc", "rte", "stsb", "cola")}
