"""Runs that were evaluated or measured in different ways never share a cell or a test."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.catalogue import METHODS
from deltasam.lab.experiments import ConfigError, Result
from deltasam.lab.experiments._config import _NOT_IDENTITY
from deltasam.lab.experiments._result import SCHEMA
from deltasam.lab.report import (
    TABLES,
    Table,
    by_cell,
    html_report,
    paper,
    read_runs,
    short_models,
    to_csv,
    to_markdown,
    usual_risk,
)
from deltasam.lab.report._evaluation import STANDARD, Evaluation, usual
from deltasam.lab.report._results import paired_tests
from deltasam.lab.report._runs import _LATER, _NOT_VARIANT, _SCHEMA
from deltasam.lab.report._section import PageRuns
from deltasam.lab.tasks import find_task

GOLDEN = Path(__file__).parent / "golden"
BASE = json.loads(next(iter(sorted((GOLDEN / "runs").rglob("mrpc*-SAM-*/result.json")))).read_text())
SUMMARY = json.loads(next(iter(sorted((GOLDEN / "runs").rglob("cnn*/result.json")))).read_text())


def write(
    folder: Path, value: float, *, base: dict[str, Any] = BASE, task: dict[str, Any] | None = None, **top
) -> Path:
    """A finished run: another result with another primary value, other options of the task, other fields."""
    config = {**base["config"], **top.pop("config", {})}
    config["task"] = {**config["task"], "eval_rows": None, **(task or {})}
    found = {**base, "run_id": folder.name, "eval_rows": 408, **top, "config": config}
    found["metrics"] = {**found["metrics"], found["primary_metric"]: value}
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(found))
    return folder


def row(table: Table, method: str, group: str | None = None):
    """The one row of a method, of a group where there are several."""
    (one,) = [
        each
        for each in table.rows
        if each.method == method and (each.group == group if group else any(c.values for c in each.cells.values()))
    ]
    return one


def write_glue(folder: Path, value: Callable[[int, int], float], seeds: Callable[[int], int]) -> None:
    """SAM's runs of all tasks of GLUE: value by number of the task and seed, number of seeds by number of the task."""
    for number, task in enumerate(paper.GLUE_TASKS):
        for seed in range(seeds(number)):
            config = {**BASE["config"], "seed": seed}
            own = {"name": task, "dataset": task, "eval_split": STANDARD[task].split}
            fields = {"task": own, "config": config, "seed": seed, "primary_metric": STANDARD[task].metric}
            made = write(folder / f"{task}-{seed}", value(number, seed), **fields, eval_rows=STANDARD[task].rows)
            result = json.loads((made / "result.json").read_text())
            (made / "result.json").write_text(json.dumps({**result, "task": task}))


def test_the_average_of_the_best_runs_is_that_of_the_columns(tmp_path: Path) -> None:
    """As in the paper: the best seed differs from task to task."""
    write_glue(tmp_path, lambda task, seed: 0.9 if seed == task % 5 else 0.8, lambda task: 5)
    table = TABLES["glue"](read_runs(tmp_path), aggregate="max")
    cell = row(table, "SAM").cells["avg"]
    assert cell.ours("max") == pytest.approx(90.0)
    assert cell.difference("max") == pytest.approx(90.0 - 83.9)
    assert cell.ours("mean") == pytest.approx(cell.summary.mean) == pytest.approx(82.0)


def test_the_best_is_taken_over_as_many_runs_as_the_paper_has(tmp_path: Path) -> None:
    write_glue(tmp_path, lambda task, seed: 0.8 + 0.01 * seed, lambda task: 10)
    table = TABLES["glue"](read_runs(tmp_path), aggregate="max")
    cells = row(table, "SAM").cells
    assert cells["mrpc"].ours("max") == pytest.approx(89.0)
    assert cells["mrpc"].difference("max") == pytest.approx(84.0 - 88.2)
    assert cells["avg"].difference("max") == pytest.approx(84.0 - 83.9)
    assert "our max of the first 5 seeds − paper" in to_markdown(table)


def test_tasks_with_different_numbers_of_seeds_have_an_average(tmp_path: Path) -> None:
    write_glue(tmp_path, lambda task, seed: 0.8 + 0.01 * seed, lambda task: 3 if task else 5)
    table = TABLES["glue"](read_runs(tmp_path))
    cell = row(table, "SAM").cells["avg"]
    assert cell.ours("mean") == pytest.approx((82.0 + 7 * 81.0) / 8)
    assert "| SAM | 81.1 |" in to_markdown(table)


@pytest.mark.parametrize(
    ("other", "note"),
    [
        ({"task": {"eval_split": "train"}}, "1 run on train"),
        ({"task": {"eval_rows": 20}, "eval_rows": 20}, "1 run on a sample of 20 rows"),
        ({"task": {"metrics": ["f1", "accuracy"]}, "primary_metric": "f1"}, "1 run by f1"),
        ({"task": {"files": {"validation": "/mine.csv"}}}, "1 run with /mine.csv"),
        ({"eval_rows": 12}, "1 run on 12 rows"),
    ],
)
def test_the_development_set_is_the_whole_development_set(tmp_path: Path, other: dict[str, Any], note: str) -> None:
    write(tmp_path / "whole", 0.80)
    write(tmp_path / "other", 0.99, **other)
    table = TABLES["glue"](read_runs(tmp_path))
    assert row(table, "SAM").cells["mrpc"].values == (80.0,)
    assert f"Left out because of another evaluation: {note}." in table.notes
    assert {key[0] for key in by_cell(read_runs(tmp_path).finished)} == {
        "mrpc",
        f"mrpc ({note.removeprefix('1 run ')})",
    }


def test_a_sample_has_a_star_and_is_shown_only_without_other_runs(tmp_path: Path) -> None:
    write(tmp_path / "few", 0.99, task={"eval_rows": 20}, eval_rows=20)
    for seed in (2, 3):
        write(tmp_path / f"more{seed}", 0.80, task={"eval_rows": 100}, eval_rows=100, seed=seed)
    table = TABLES["glue"](read_runs(tmp_path))
    assert row(table, "SAM").cells["mrpc"].values == (80.0, 80.0)
    assert "80.0 ±0.0\\*" in to_markdown(table)
    assert "on a sample of 100 rows\n" in to_csv(table)
    assert any(note.startswith("* Not the standard") and "on a sample of 100 rows." in note for note in table.notes)
    assert "Left out because of another evaluation: 1 run on a sample of 20 rows." in table.notes


def test_methods_are_tested_on_the_same_rows(tmp_path: Path) -> None:
    write(tmp_path / "a", 0.80, method="ERM", seed=1)
    write(tmp_path / "b", 0.99, seed=1, task={"eval_split": "test"})
    runs = read_runs(tmp_path)
    table = TABLES["glue"](runs)
    assert not any(cell.values for each in table.rows if each.method == "SAM" for cell in each.cells.values())
    assert not any("SAM − ERM" in note for note in table.notes)
    assert "mrpc (on test)" in html_report(runs, [])
    assert paired_tests(PageRuns(runs)) is None


def test_models_of_one_name_in_two_places_are_two_models(tmp_path: Path) -> None:
    write(tmp_path / "a", 0.80, method="ERM", model="/a/final")
    write(tmp_path / "b", 0.90, model="/b/final/")
    runs = read_runs(tmp_path)
    table = TABLES["glue"](runs)
    assert row(table, "ERM").group == "a/final"
    assert row(table, "SAM").group == "b/final"
    assert not any("SAM − ERM" in note for note in table.notes)
    assert {model for _, model, _ in by_cell(runs.finished)} == {"/a/final", "/b/final"}
    assert paired_tests(PageRuns(runs)) is None
    assert short_models(["x", "y/x", "/y/x", "m"]) == {"x": "x", "y/x": "y/x", "/y/x": "/y/x", "m": "m"}


def test_other_summarization_tasks_are_not_in_the_table(tmp_path: Path) -> None:
    write(tmp_path / "a-paper", 0.40, base=SUMMARY, eval_rows=13368)
    write(tmp_path / "own", 0.90, base=SUMMARY, task={"name": "seq2seq"}, eval_rows=13368)
    result = json.loads((tmp_path / "own/result.json").read_text())
    (tmp_path / "own/result.json").write_text(json.dumps({**result, "task": "seq2seq"}))
    table = TABLES["summarization"](read_runs(tmp_path))
    assert [each.cells["rouge1"].values for each in table.rows if each.cells["rouge1"].values] == [(40.0,)]


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_diverged_run_is_named_and_left_out(tmp_path: Path, value: float | None) -> None:
    for method in ("ERM", "SAM"):
        for seed in (1, 2):
            write(tmp_path / f"{method}{seed}", 0.8 + seed / 100, method=method, seed=seed)
    write(tmp_path / "ERM3", value, method="ERM", seed=3)
    runs = read_runs(tmp_path)
    assert runs.problems() == ["1 run left out, a metric is not finite: ERM3"]
    tables = [make(runs) for make in TABLES.values()]
    assert row(tables[0], "ERM").cells["mrpc"].values == pytest.approx((81.0, 82.0))
    assert "a metric is not finite: ERM3" in html_report(runs, tables)


def test_a_run_with_any_metric_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    """Weights that are not finite predict a single class, and that accuracy is finite."""
    write(tmp_path / "good", 0.7, seed=1)
    write(tmp_path / "bad", 0.8, seed=2, metrics={**BASE["metrics"], "loss": math.nan})
    runs = read_runs(tmp_path)
    assert [run.run_id for run in runs.finished] == ["good"]
    assert runs.problems() == ["1 run left out, a metric is not finite: bad"]


def test_forgetting_on_another_text_is_named_and_left_out(tmp_path: Path) -> None:
    """A machine without the text of the data folder measures on another one."""
    for seed, text in ((1, "help"), (2, "wikipedia"), (3, "wikipedia")):
        numbers = {**BASE["metrics"], "forgetting": 0.1 * seed, "general_nll": 3.0, "general_nll_before": 2.9}
        write(tmp_path / f"run{seed}", 0.7, seed=seed, metrics=numbers, origins={"general text": text})
    runs = read_runs(tmp_path)
    assert [run.metrics.get("forgetting") for run in runs.finished] == [None, 0.2, pytest.approx(0.3)]
    assert "general_nll" not in runs.finished[0].metrics
    assert runs.problems() == ["1 run without forgetting, measured on another text: run1"]


@pytest.mark.parametrize(("higher", "best"), [(True, "b"), (False, "a")])
def test_the_best_settings_have_the_smallest_metric_if_less_is_better(tmp_path: Path, higher: bool, best: str) -> None:
    for name, value, precision in (("a", 0.2, "fp32"), ("b", 0.4, "bf16")):
        write(tmp_path / name, value, config={"precision": precision}, higher_is_better=higher)
    (cell,) = by_cell(read_runs(tmp_path).finished).values()
    assert [run.run_id for run in cell] == [best]


def test_repetitions_differ_only_in_the_seed(tmp_path: Path) -> None:
    for seed in range(1, 6):
        others = {"workers": 2, "capture": True, "on_out_of_memory": "split"} if seed > 3 else {}
        write(tmp_path / f"s{seed}", 0.8, seed=seed, config={"workers": 0, "capture": False, **others, "seed": seed})
    (cell,) = by_cell(read_runs(tmp_path).finished).values()
    assert [run.seed for run in cell] == [1, 2, 3, 4, 5]
    assert set(_NOT_VARIANT) == {"seed", *_NOT_IDENTITY}
    later = {
        name: {field.name: field.metadata["later"] for field in dataclasses.fields(kind) if "later" in field.metadata}
        for name, kind in METHODS.items()
    }
    assert {name: fields for name, fields in later.items() if fields} == _LATER


def test_a_later_option_at_its_old_value_does_not_change_the_variant(tmp_path: Path) -> None:
    """Runs without the option, and runs with one of its first values, are repetitions of each other."""
    for seed, option in enumerate([{}, {"factors": "exact"}, {"factors": "auto"}, {"factors": "bfloat16"}]):
        config = {"method": {"name": "PerInstanceSAM", "rho": 0.01, **option}}
        write(tmp_path / str(seed), 0.8, method="PerInstanceSAM", seed=seed, config=config)
    variants = [run.variant for run in read_runs(tmp_path).finished]
    assert variants[0] == variants[1] == variants[2] != variants[3]


def test_the_former_name_of_what_is_trained_does_not_change_the_variant(tmp_path: Path) -> None:
    for seed, params in enumerate(["all", "trained", "norms"]):
        write(tmp_path / str(seed), 0.8, seed=seed, config={"method": {"name": "SAM", "rho": 0.01, "params": params}})
    variants = [run.variant for run in read_runs(tmp_path).finished]
    assert variants[0] == variants[1] != variants[2]


def test_standard_evaluations_are_those_of_the_tasks() -> None:
    for name, standard in STANDARD.items():
        task = find_task(name)
        assert (task.eval_split, task.primary, task.eval_rows) == standard[:3]
        assert standard.data in ("", task.dataset)


def risk(folder: Path, value: float, **settings: object) -> None:
    """A measured risk in a run folder."""
    (folder / "analysis").mkdir()
    wanted = {"rho": 0.05, "rows": 256, "steps": 1, "split": None, **settings}
    text = json.dumps({"settings": wanted, "value": value, "loss": 0.1, "measured": 16})
    (folder / "analysis/adversarial-risk.json").write_text(text)


def test_ties_prefer_the_papers_radius_and_the_most_rows(tmp_path: Path) -> None:
    measured = ({"rho": 0.01}, {"rho": 0.05, "rows": 16}, {"rho": 0.05, "rows": 64}, {"rho": 0.01})
    for seed, settings in enumerate(measured):
        risk(write(tmp_path / f"s{seed}", 0.8, seed=seed), seed + 1.0, **settings)
    runs = read_runs(tmp_path)
    table = TABLES["adversarial-risk"](runs)
    assert "Ours at rho = 0.05." in table.notes
    assert row(table, "SAM").cells["mrpc risk"].values == (3.0,)
    assert usual_risk(runs.finished, rho=0.05)["rows"] == 64


def test_a_whole_split_is_preferred_to_more_runs_on_a_sample() -> None:
    whole, sample = Evaluation("validation", "f1", rows=90), Evaluation("validation", "f1", sample=20, rows=20)
    part = Evaluation("train[90%:]", "f1", rows=200)
    assert usual([("own", sample)] * 3 + [("own", whole)] + [("own", part)] * 5) == {"own": whole}
    assert usual([("own", sample)] * 3 + [("own", part)] * 5) == {"own": sample}


def test_risks_of_different_radii_are_not_averaged(tmp_path: Path) -> None:
    for seed, value, settings in (
        (1, 1.0, {}),
        (2, 9.0, {"rho": 0.5, "rows": 16}),
        (3, 1.2, {}),
        (4, 4.0, {"rows": 16}),
    ):
        risk(write(tmp_path / f"s{seed}", 0.8, seed=seed), value, **settings)
    runs = read_runs(tmp_path)
    table = TABLES["adversarial-risk"](runs)
    assert row(table, "SAM").cells["mrpc risk"].values == (1.0, 1.2)
    assert "Ours at rho = 0.05." in table.notes
    (left,) = [note for note in table.notes if note.startswith("Risks left out")]
    assert "1 at rho = 0.05 (rows 16, steps 1); 1 at rho = 0.5 (rows 16, steps 1)" in left
    asked = TABLES["adversarial-risk"](runs, rho=0.5)
    assert row(asked, "SAM").cells["mrpc risk"].values == (9.0,)
    assert "Ours at rho = 0.5." in asked.notes
    assert "1.100" in html_report(runs, [])  # the mean of the two with the same settings
    assert usual_risk(runs.finished) == {"rho": 0.05, "rows": 256, "steps": 1, "split": None}
    assert usual_risk(runs.finished, rho=0.5) == {"rho": 0.5, "rows": 16, "steps": 1, "split": None}
    (tmp_path / "s2/analysis/adversarial-risk.json").write_text('{"value": 9.0}')  # as older files have it
    notes = TABLES["adversarial-risk"](runs).notes
    assert any("1 at a radius that was not recorded" in note for note in notes)
    assert usual_risk([], rows=7) == {"rho": 0.05, "rows": 7, "steps": 1, "split": None}


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[1]",
        '{"settings": {"rho": 0.05}',
        '{"settings": {"rho": 0.05}, "value": null}',
        f'{{"settings": {{"rho": 0.05}}, "value": {10**400}, "lines": {{"a": {{"x": [0], "loss": [{10**400}]}}}}}}',
        f'{{"settings": {{"rho": 1{10**400}}}, "value": 1, "examples": [], "weights": [{10**400}]}}',
        '{"weights": [1.0], "examples": [], "wrong_labels": {"count": 1, "weight": null, "others": 1}}',
    ],
    ids=lambda text: text[:40],
)
def test_broken_measurements_are_not_measured_and_are_reported(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "one", 0.8)
    (folder / "analysis").mkdir()
    for name in ("adversarial-risk", "landscape", "instance-weights"):
        (folder / f"analysis/{name}.json").write_text(text)
    runs = read_runs(tmp_path)
    table = TABLES["adversarial-risk"](runs)
    assert row(table, "SAM").cells["mrpc risk"].values == ()
    assert "adversarial-risk.json is truncated or altered and counts as not measured: one." in table.notes
    page = html_report(runs, [table])
    for name in ("adversarial-risk", "landscape", "instance-weights"):
        assert f"{name}.json is truncated or altered" in page


def test_a_result_of_a_newer_version_is_not_read(tmp_path: Path) -> None:
    assert _SCHEMA == SCHEMA
    write(tmp_path / "old", 0.8)
    newer = write(tmp_path / "new", 0.9, schema=SCHEMA + 1)
    runs = read_runs(tmp_path)
    assert [run.path.name for run in runs.finished] == ["old"]
    assert "newer version" in runs.unreadable[newer]
    with pytest.raises(ConfigError, match=r"written by a newer version of deltasam .*update") as error:
        Result.read(newer / "result.json")
    assert "remove" not in str(error.value)


def test_errors_are_compared_separately_from_points(tmp_path: Path) -> None:
    for seed in range(5):
        for method, accuracy, error in (("ERM", 0.80, 2.5), ("SAM", 0.81, 2.4)):
            own = {"seed": seed, "method": method}
            write(tmp_path / f"mrpc-{method}-{seed}", accuracy + seed / 1000, **own)
            less = {"primary_metric": "mse", "higher_is_better": False, "metrics": {"loss": 1.0}, "task": "regression"}
            folder = tmp_path / f"own-{method}-{seed}"
            write(folder, error + seed / 1000, **own)
            found = json.loads((folder / "result.json").read_text())
            found["config"]["task"] |= {"name": "regression", "dataset": "own"}
            less["metrics"] = {"mse": error + seed / 1000}
            (folder / "result.json").write_text(json.dumps({**found, **less}))
    found = paired_tests(PageRuns(read_runs(tmp_path))).frame
    assert found[["method", "against", "better by mean in"]].values.tolist() == [["SAM", "ERM", "1 of 1"]] * 2
    assert found["difference"].tolist() == ["+1.00", "−0.1"]
    assert found["unit"].tolist() == ["points", "mse of regression (less is better)"]


@pytest.mark.parametrize(
    "altered",
    [
        [],
        {"config": {"method": "SAM"}},
        {"steps": 0},
        {"config": []},
        {"metrics": [1]},
        {"metrics": {"accuracy": 10**400}},
        {"best_value": 10**400},
    ],
    ids=lambda altered: str(altered)[:40],
)
def test_an_altered_result_is_unreadable_and_left_out(tmp_path: Path, altered: Any) -> None:
    write(tmp_path / "sound", 0.8)
    path = write(tmp_path / "altered", 0.9) / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **altered} if altered else altered))
    runs = read_runs(tmp_path)
    assert [run.path.name for run in runs.finished] == ["sound"]
    assert list(runs.unreadable) == [path.parent]
    assert "1 run unreadable" in html_report(runs, [])


@pytest.mark.parametrize("altered", [{"metrics": [1]}, {"metrics": {"accuracy": 10**400}}, {"primary_value": 10**400}])
def test_invalid_numbers_are_not_a_result(tmp_path: Path, altered: dict[str, Any]) -> None:
    path = write(tmp_path / "altered", 0.9) / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **altered}))
    with pytest.raises(ConfigError, match=r"result.json: not a result of this version .*; remove it"):
        Result.read(path)


def test_a_training_that_took_no_time_does_not_break_the_ratios(tmp_path: Path) -> None:
    for method in ("ERM", "SAM", "PerInstanceSAM"):
        write(tmp_path / method, 0.8, method=method, train_seconds=0.0)
    runs = read_runs(tmp_path)
    assert html_report(runs, [make(runs) for make in TABLES.values()]).count(">1.00×<") == 3  # time / ERM
