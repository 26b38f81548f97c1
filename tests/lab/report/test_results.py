"""The first sections of the page: dot plots, the best method or why none is named, tests, cost, warnings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.report import TABLES, html_report, read_runs
from deltasam.lab.report._cost import cost
from deltasam.lab.report._results import paired_tests, results, warnings
from deltasam.lab.report._section import Card, PageRuns
from deltasam.lab.report._strips import axis_for
from helpers.reports import write_run


def page_runs(folder: Path) -> PageRuns:
    return PageRuns(read_runs(folder))


def only_card(folder: Path) -> Card:
    (card,) = results(page_runs(folder)).cards
    return card


def write_pair(folder: Path, seeds: int = 3, sam: dict[str, Any] | None = None, **both: Any) -> None:
    """Runs of plain training and of SAM, which is two points better."""
    for seed in range(seeds):
        write_run(folder, "ERM", seed, score=0.80 + seed / 100, **both)
        write_run(folder, "SAM", seed, score=0.82 + seed / 100, **{"rho": 0.05, **both, **(sam or {})})


def best(card: Card) -> list[str]:
    return [row["method"] for row in card.rows if row["best"]]


def test_a_row_has_mean_interval_difference_and_settings(tmp_path: Path) -> None:
    write_pair(tmp_path)
    card = only_card(tmp_path)
    plain, sam = card.rows
    assert (plain["mean"], plain["difference"], plain["settings"]) == ("81.00", "–", "")
    assert (sam["mean"], sam["difference"], sam["seeds"], sam["settings"]) == ("83.00", "+2.00", "3", "radius 0.05")
    assert sam["p"] == "0.25"
    assert re.fullmatch(r"8[23]\.\d\d to 8[34]\.\d\d", sam["95% interval"])
    assert "learning rate 0.0001, epochs 3, batch size 32, training rows 96" in card.about
    assert [view.label for view in card.views] == ["score", "difference to plain training"]
    assert best(card) == ["SAM"]


def test_p_is_adjusted_for_all_tests_of_the_table(tmp_path: Path) -> None:
    lower = {"task": "stars", "primary_metric": "mse", "higher_is_better": False}
    for seed in range(6):
        write_run(tmp_path, "ERM", seed, score=0.8)
        write_run(tmp_path, "SAM", seed, score=0.9 + seed / 1000, rho=0.05)
        write_run(tmp_path, "ERM", seed, metrics={"mse": 0.5}, **lower)
        write_run(tmp_path, "SAM", seed, metrics={"mse": 0.4 - seed / 1000}, rho=0.05, **lower)
    for seed in range(2):  # too few for the table
        write_run(tmp_path, "ASAM", seed, score=0.9, rho=0.05)
    found = paired_tests(page_runs(tmp_path))
    assert found is not None
    assert [(row["method"], row["p"], row["Holm p"]) for row in found.rows] == [("SAM", "0.0312", "0.0625")] * 2


def test_the_dots_are_where_their_values_are(tmp_path: Path) -> None:
    write_pair(tmp_path)
    scores, gaps = only_card(tmp_path).views
    places = [[float(x) for x in re.findall(r'class="run" cx="([\d.]+)%"', text)] for text in scores.strips]
    assert places == [[scores.axis.place(v) for v in (80, 81, 82)], [scores.axis.place(v) for v in (82, 83, 84)]]
    assert 0 < min(map(min, places)) < max(map(max, places)) < 100
    (reference,) = set(re.findall(r'class="reference" x1="([\d.]+)%"', "".join(scores.strips)))
    assert float(reference) == scores.axis.place(81)
    assert gaps.strips[0] == ""


def test_two_seeds_have_no_interval_no_test_and_no_best_method(tmp_path: Path) -> None:
    write_pair(tmp_path, seeds=2)
    card = only_card(tmp_path)
    assert best(card) == []
    assert any("fewer than 3 seeds (ERM 2, SAM 2)" in note for note in card.notes)
    assert {(row["95% interval"], row["p"]) for row in card.rows} == {("–", "–")}
    assert "interval" not in "".join(strip for view in card.views for strip in view.strips)
    assert paired_tests(page_runs(tmp_path)) is None


@pytest.mark.parametrize(
    ("changed", "named", "shown"),
    [
        ({"config": {"optimizer": {"lr": 1e-3}}}, "learning rate", "0.001"),
        ({"config": {"schedule": {"epochs": 5.0}}}, "epochs", "5"),
        ({"config": {"batch": {"size": 8}}}, "batch size", "8"),
        ({"config": {"task": {"max_length": 64}}}, "task.max_length", "64"),
    ],
)
def test_no_best_method_where_more_than_the_method_differs(
    tmp_path: Path, changed: dict[str, Any], named: str, shown: str
) -> None:
    write_pair(tmp_path, sam=changed)
    card = only_card(tmp_path)
    assert best(card) == []
    assert any(f"{named} differs" in note for note in card.notes)
    assert f"{named} {shown}" in card.rows[1]["settings"]
    assert card.rows[1]["p"] == "–"
    assert paired_tests(page_runs(tmp_path)) is None


def test_no_best_method_where_the_radius_differs(tmp_path: Path) -> None:
    write_pair(tmp_path)
    for seed in range(3):
        write_run(tmp_path, "DeltaSAM", seed, score=0.9, rho=0.01)
    card = only_card(tmp_path)
    assert best(card) == []
    assert any("radius differs (0.05; δ-SAM: 0.01)" in note for note in card.notes)
    assert [row["p"] for row in card.rows] == ["–", "0.25", "0.25"]  # plain training has no radius
    found = paired_tests(page_runs(tmp_path))
    assert found.frame[["method", "against"]].values.tolist() == [["SAM", "ERM"], ["δ-SAM", "ERM"]]
    assert "δ-SAM against SAM on reviews, tiny (radius)" in found.note


def test_no_best_method_where_one_had_more_settings_to_choose_from(tmp_path: Path) -> None:
    write_pair(tmp_path)
    for seed in range(3):
        write_run(tmp_path, "SAM", seed, score=0.7, rho=0.5)
    card = only_card(tmp_path)
    assert best(card) == []
    assert any("number of settings tried differs" in note for note in card.notes)
    assert card.rows[1]["settings"] == "radius 0.05, best of 2 settings"


def test_options_that_do_not_change_the_weights_do_not_count(tmp_path: Path) -> None:
    write_pair(tmp_path, sam={"config": {"task": {"evaluate_on": ["films"], "label_noise": 0.0}}})
    assert best(only_card(tmp_path)) == ["SAM"]


def test_the_smallest_error_is_the_best(tmp_path: Path) -> None:
    write_pair(tmp_path, primary_metric="loss", higher_is_better=False, metrics={"loss": 0.5})
    for path in tmp_path.rglob("result.json"):
        found = json.loads(path.read_text())
        found["metrics"]["loss"] = found["metrics"]["accuracy"]
        path.write_text(json.dumps(found))
    assert best(only_card(tmp_path)) == ["ERM"]


def test_one_run_has_no_chart(tmp_path: Path) -> None:
    write_run(tmp_path, log=[{"step": 1, "loss": 0.7, "eval_accuracy": 0.8}])
    assert only_card(tmp_path).views == []
    page = html_report(read_runs(tmp_path), [])
    assert "<figure>" not in page
    assert 'class="strip"' not in page


def test_label_noise_samples_and_adapters_are_setups_of_their_own(tmp_path: Path) -> None:
    changes = [{}, {"task": {"label_noise": 0.2}}, {"task": {"rows": 50}}, {"model": {"lora": {"r": 8}}}]
    for change in changes:
        write_run(tmp_path, config=change)
    assert set(page_runs(tmp_path).setups) == {
        ("reviews", "tiny"), ("reviews (20% label noise)", "tiny"), ("reviews (50 training rows)", "tiny"),
        ("reviews", "tiny, LoRA"),
    }  # fmt: skip


def test_the_papers_tables_are_left_out_where_the_paper_has_no_such_run(tmp_path: Path) -> None:
    for task, model in (("reviews", "bert-base-cased"), ("rte", "models/tiny")):
        write_run(tmp_path, task=task, model=model)
    runs = read_runs(tmp_path)
    assert "The paper&#39;s table" not in html_report(runs, [make(runs) for make in TABLES.values()])
    write_run(tmp_path, task="rte", model="bert-base-cased", config={"task": {"name": "rte", "dataset": "rte"}})
    runs = read_runs(tmp_path)
    assert "The paper&#39;s table: glue" in html_report(runs, [make(runs) for make in TABLES.values()])


def test_the_title_says_what_is_compared(tmp_path: Path) -> None:
    write_pair(tmp_path)
    assert "<h1>ERM and SAM on reviews with tiny</h1>" in html_report(read_runs(tmp_path), [])
    assert "<h1>Mine</h1>" in html_report(read_runs(tmp_path), [], title="Mine")


def test_cost_is_relative_to_plain_training_with_the_same_steps(tmp_path: Path) -> None:
    write_run(tmp_path, "ERM", train_seconds=9.0)
    write_run(tmp_path, "SAM", train_seconds=18.0, rho=0.05, forward_passes=18, backward_passes=18)
    (card,) = cost(page_runs(tmp_path)).cards
    assert [row["mean"] for row in card.rows] == ["1.00×", "2.00×"]
    assert card.rows[1]["forward + backward"] == "2 + 2"
    assert card.rows[1]["ms per update"] == "2000.0"
    for path in tmp_path.rglob("result.json"):  # SAM is replayed as a CUDA graph, plain training is not
        found = json.loads(path.read_text())
        found["config"]["capture"] = found["method"] == "SAM"
        path.write_text(json.dumps(found))
    (card,) = cost(page_runs(tmp_path)).cards
    assert [row["mean"] for row in card.rows] == ["1000.0", "2000.0"]


def test_runs_that_did_not_learn_are_in_a_box(tmp_path: Path) -> None:
    write_pair(tmp_path)
    assert warnings(page_runs(tmp_path)) is None
    write_run(tmp_path, "DeltaSAM", 1, score=0.51, rho=0.05)
    found = warnings(page_runs(tmp_path))
    (line,) = found.lines
    assert line.startswith("δ-SAM on reviews, tiny, 1 of 1 seed: the accuracy 0.5100 is no better than guessing")
    assert '<div class="warning">' in html_report(read_runs(tmp_path), [])


@pytest.mark.parametrize("values", [[0.5, 0.5], [0.0], [-3.0, 1e6], [1e-7, 3e-7]])
def test_an_axis_holds_its_values_and_has_ticks(values: list[float]) -> None:
    axis = axis_for(values)
    assert axis.ticks
    assert all(0 < axis.place(value) < 100 for value in values)
    labels = [label for _, label in axis.labels()]
    assert len(set(labels)) == len(labels)
