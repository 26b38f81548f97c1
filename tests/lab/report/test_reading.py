"""Reading run folders, field by field, and choosing the runs of a method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltasam.lab.experiments._parts import RADII, named_plain
from deltasam.lab.report import TABLES, Run, Runs, by_cell, read_runs, run_folders
from deltasam.lab.report._cost import cost
from deltasam.lab.report._evaluation import Evaluation
from deltasam.lab.report._runs import _MAIN, _method
from deltasam.lab.report._section import PageRuns
from deltasam.lab.report._select import select
from deltasam.lab.report._statistics import _resampled_means
from deltasam.step.radius import Scheduled

GOLDEN = Path(__file__).parent / "golden/runs"


def result(kind: str) -> dict[str, Any]:
    """A result among the golden ones."""
    found: dict[str, Any] = json.loads(sorted(GOLDEN.rglob(f"{kind}/result.json"))[0].read_text())
    return found


def read(folder: Path, *results: dict[str, Any]) -> list[Run]:
    """The runs with these results, in folders of this order."""
    for number, one in enumerate(results):
        (folder / f"{number}").mkdir()
        (folder / f"{number}/result.json").write_text(json.dumps({**one, "run_id": str(number)}))
    return read_runs(folder).finished


def test_every_field_is_read(tmp_path: Path) -> None:
    base = result("mrpc*-DeltaSAM-*")
    method = {**base["config"]["method"], "rho": 0.3, "signed": True}
    numbers = {"forward_passes": 40, "backward_passes": 20, "steps": 10, "train_seconds": 0.5, "peak_memory_bytes": 7}
    own = {"model": "./models/own/", "best_value": 0.9, "config": {**base["config"], "method": method}}
    (one,) = read(tmp_path, {**base, **numbers, **own})
    assert (one.forwards, one.backwards, one.steps, one.train_seconds, one.memory) == (40, 20, 10, 0.5, 7)
    assert (one.model, one.best) == ("models/own", 0.9)
    assert dict(one.settings)["rho"] == 0.3
    assert "signed" not in dict(one.settings)  # not a number


def test_the_primary_metric_may_be_missing_from_the_metrics(tmp_path: Path) -> None:
    (one,) = read(tmp_path, {**result("mrpc*-SAM-*"), "metrics": {"loss": 0.5}, "primary_value": 0.75})
    assert one.metrics == {"loss": 0.5, one.primary: 0.75}


def test_the_training_data_of_mirror_does_not_change_its_evaluation(tmp_path: Path) -> None:
    base = result("mirror*")
    config = base["config"]
    other = {**base, "config": {**config, "task": {**config["task"], "dataset": "other_sentences"}}}
    assert len({run.evaluation for run in read(tmp_path, base, other)}) == 1


def test_settings_of_a_regulariser_do_not_hide_those_of_the_method(tmp_path: Path) -> None:
    base = result("mrpc*-DeltaSAM-*")
    config = {**base["config"], "regularisers": [{"name": "SMART", "eta": 0.7, "scale": 2, "norm": "linf"}]}
    (run,) = read(tmp_path, {**base, "config": config})
    own = base["config"]["method"]
    found = dict(run.settings)
    assert (found["eta"], found["SMART.eta"], found["scale"]) == (own["eta"], 0.7, 2.0)
    assert "norm" not in found


def test_there_are_no_runs_inside_a_run(tmp_path: Path) -> None:
    base = result("mrpc*-SAM-*")
    read(tmp_path, base)
    inside = tmp_path / "0/copies"
    inside.mkdir()
    read(inside, base, base)
    assert [run.path for run in read_runs(tmp_path).finished] == [tmp_path / "0"]
    assert run_folders(tmp_path) == run_folders(tmp_path / "0") == [tmp_path / "0"]


def test_the_runs_of_a_cell_are_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    base = result("mrpc*-SAM-*")
    runs = read(tmp_path, *({**base, "seed": seed, "config": {**base["config"], "seed": seed}} for seed in (3, 1, 2)))
    assert [[run.seed for run in found] for found in by_cell(runs).values()] == [[1, 2, 3]]


@pytest.mark.parametrize("strict", [True, False])
def test_a_part_of_a_split_is_never_shown(tmp_path: Path, strict: bool) -> None:
    base = result("mrpc*-SAM-*")
    task = {**base["config"]["task"], "name": "own", "eval_split": "train[90%:]"}
    runs = read(tmp_path, {**base, "task": "own", "config": {**base["config"], "task": task}})
    assert len(runs) == 1
    assert select(runs, strict=strict).cells == {}


@pytest.mark.parametrize("same", [True, False])
def test_times_of_two_devices_are_not_compared(tmp_path: Path, same: bool) -> None:
    base = result("mrpc*-SAM-*")
    methods = ("ERM", "SAM", "PerInstanceSAM")
    read(tmp_path, *({**base, "method": name, "device": "one" if same else name} for name in methods))
    runs = read_runs(tmp_path)
    ratios = [row for row in TABLES["running-time"](runs).rows if row.method == "PerInstanceSAM / SAM"]
    assert any(row.cells["mrpc"].values for row in ratios) == same
    assert ("per-instance SAM" in relative_times(runs)) == same


def relative_times(runs: Runs) -> dict[str, str]:
    """The times relative to plain training, by method."""
    cards = cost(PageRuns(runs)).cards
    return {row["method"]: row["mean"] for card in cards for row in card.rows if row["mean"].endswith("×")}


def test_the_time_of_an_update_is_a_multiple_of_erms(tmp_path: Path) -> None:
    base = result("mrpc*-SAM-*")
    costs = {"ERM": (10.0, 10), "SAM": (40.0, 20), "PerInstanceSAM": (25.0, 10)}
    read(tmp_path, *({**base, "method": m, "train_seconds": s, "steps": n} for m, (s, n) in costs.items()))
    assert relative_times(read_runs(tmp_path)) == {"ERM": "1.00×", "SAM": "2.00×", "per-instance SAM": "2.50×"}


def test_an_unknown_number_of_rows_is_not_a_difference() -> None:
    known, unknown = Evaluation("validation", "accuracy", rows=408), Evaluation("validation", "accuracy")
    assert known.difference(unknown) == unknown.difference(known) == ""


def test_up_to_six_values_all_resamples_are_enumerated() -> None:
    means = _resampled_means(np.arange(6.0))
    assert len(means) == 6**6
    assert np.mean(means) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("rho", "method", "settings"),
    [
        (0.02, "SAM", {"rho": 0.02}),
        ({"name": "LossShare", "share": 0.02, "at_most": None}, "SAM(LossShare 0.02)", {"rho.share": 0.02}),
        (
            {"name": "LossBudget", "sigma": 0.1, "at_most": {"name": "Relative", "r": 1e-3, "per": "all"}},
            "SAM(LossBudget 0.1)", {"rho.sigma": 0.1, "rho.at_most.r": 1e-3},
        ),
        ({"name": "Relative", "r": 1e-4, "per": "all"}, "SAM(Relative 0.0001)", {"rho.r": 1e-4}),
        ({"name": "Layerwise", "rho": 0.03, "by": "entries"}, "SAM(Layerwise 0.03)", {"rho": 0.03}),
        ({"name": "Scheduled", "rho": 0.05, "end": 0.5}, "SAM(Scheduled)", {"rho": 0.05, "rho.end": 0.5}),
        (
            {"name": "Scheduled", "rho": {"name": "LossBudget", "sigma": 0.05}, "start": 0.5},
            "SAM(LossBudget 0.05, Scheduled)", {"rho.sigma": 0.05, "rho.start": 0.5},
        ),
        (
            {"embeddings": 0.0, "rest": {"name": "LossShare", "share": 0.1}},
            "SAM(groups)", {"rho.embeddings": 0.0, "rho.rest.share": 0.1},
        ),
    ],
)  # fmt: skip
def test_a_rule_for_the_radius_is_part_of_the_method(
    rho: Any, method: str, settings: dict[str, float], tmp_path: Path
) -> None:
    base = result("mrpc*-SAM-*")
    own = {**base["config"]["method"], "rho": rho}
    (run,) = read(tmp_path, {**base, "config": {**base["config"], "method": own}})
    assert run.method == method
    assert {name: value for name, value in run.settings if name.startswith("rho")} == settings


def test_every_rule_for_the_radius_has_a_main_number() -> None:
    for kind in RADII.values():
        if kind is not Scheduled:
            rule = named_plain(kind())
            assert _method("SAM", {"rho": rule}) == f"SAM({kind.__name__} {rule[_MAIN[kind.__name__]]:g})"


def test_radii_by_numbers_and_by_rules_are_compared_as_methods(tmp_path: Path) -> None:
    base = result("mrpc*-SAM-*")
    config = base["config"]
    rule = {**config["method"], "rho": {"name": "LossShare", "share": 0.02, "at_most": None}}
    delta = {**config["method"], "name": "DeltaSAM", "rho": rule["rho"], "weighting": {"name": "OwnGradient"}}
    runs = read(
        tmp_path, base, {**base, "config": {**config, "method": rule}},
        {**base, "method": "DeltaSAM+RDrop", "config": {**config, "method": delta}},
    )  # fmt: skip
    assert {run.method for run in runs} == {
        "SAM", "SAM(LossShare 0.02)", "DeltaSAM(OwnGradient, LossShare 0.02)+RDrop"
    }  # fmt: skip
    labels = {row.label for row in TABLES["glue"](Runs(runs)).rows}
    assert {"SAM", "SAM, LossShare 0.02", "δ-SAM, weights along own gradients, LossShare 0.02 + RDrop"} <= labels
    TABLES["hyperparameters"](Runs(runs))  # rules have no rho to list
