"""Runs become arms and setups, and pairs by seed within a setup and a condition."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from deltasam.lab.pages.effects import effect_table, missing, setup_table, shown
from deltasam.lab.pages.evidence import clean, evidence, of_arm, paired, topic, values
from deltasam.lab.pages.plan import cells, planned
from deltasam.lab.sweeps import final_runs, read_sweep
from helpers.evidence import table_rows, write_evidence
from helpers.results import write_run


def test_a_folder_that_does_not_exist_gives_no_rows(tmp_path: Path) -> None:
    frame = clean(evidence(tmp_path, "pays"))
    assert frame.empty
    assert effect_table(frame, {"score": "metric"}) == "No runs yet."
    assert setup_table(frame, "score", ["RTE, minilm-l6"]) == "No runs yet."


def test_a_seed_pairs_with_the_same_seed_model_task_and_condition(tmp_path: Path) -> None:
    folder = tmp_path / "pays"
    for seed in (1, 2, 3):
        write_evidence(folder, "rte", seed=seed, score=0.5 + seed / 10)
        write_evidence(folder, "rte", seed=seed, score=0.1, label_noise=0.2)
        write_evidence(folder, "rte", seed=seed, score=0.2, rows=250)
        write_evidence(folder, "rte", seed=seed, score=0.3, model="/models/minilm-l6")
    sam = {"name": "SAM", "rho": 0.01}
    for seed in (2, 3, 4):
        write_evidence(folder, "rte", sam, seed=seed, score=0.5 + seed / 10 + 0.02 * seed)
    frame = clean(evidence(tmp_path, "pays"))
    found = paired(of_arm(frame, "SAM"), of_arm(frame, "ERM"), "score")
    assert list(found) == ["RTE, bert-small-wiki"]
    assert found["RTE, bert-small-wiki"] == pytest.approx([4.0, 6.0]), "seeds 2 and 3"
    assert values(of_arm(frame, "ERM"), "score")["RTE, minilm-l6"] == [30.0] * 3


def test_runs_that_choose_settings_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "base", "rte", seed=1, metrics={"accuracy": 0.9}, split="train[90%:]")
    write_run(tmp_path / "base", "rte", seed=1, metrics={"accuracy": 0.6})
    assert list(evidence(tmp_path, "base")["score"]) == [60.0]


def test_an_arm_names_the_settings_of_which_there_are_several(tmp_path: Path) -> None:
    folder = tmp_path / "pays-llm"
    for rho in (0.02, 0.005):
        own = {"name": "PerInstanceSAM", "rho": rho, "group": 1, "params": "base"}
        write_evidence(folder, "mnli-prompt", own, seed=1, score=0.6, lora=True)
    write_evidence(folder, "mnli-prompt", {"name": "SAM", "rho": 0.01}, seed=1, score=0.6, lora=True)
    write_evidence(folder, "sst2-prompt", {"name": "SAM", "rho": 0.02}, seed=1, score=0.6)
    write_evidence(folder, "mnli-prompt", "RandomPerturbation", seed=1, score=0.6)
    shuffled = {"name": "DeltaSAM", "rho": 0.01, "weighting": {"name": "RandomWeights"}}
    write_evidence(folder, "mnli-prompt", shuffled, seed=1, score=0.6)
    frame = evidence(tmp_path, "pays-llm")
    assert dict(zip(frame["arm"], frame["setup"], strict=True)) == {
        "per-instance SAM, frozen weights, rho = 0.02": "MNLI, bert-small-wiki, LoRA",
        "per-instance SAM, frozen weights, rho = 0.005": "MNLI, bert-small-wiki, LoRA",
        "SAM": "SST-2, bert-small-wiki",  # two radii, but not on the same task
        "random perturbation": "MNLI, bert-small-wiki",
        "δ-SAM, weights shuffled": "MNLI, bert-small-wiki",
    }
    listed = list(table_rows(effect_table(frame, {"score": "metric"}, ["per-instance SAM, frozen weights", "SAM"])))
    assert listed[3:5] == [
        "per-instance SAM, frozen weights, rho = 0.005",
        "per-instance SAM, frozen weights, rho = 0.02",
    ], "in the order of the radii"


def test_subsets_of_a_task_are_two_setups(tmp_path: Path) -> None:
    write_evidence(tmp_path / "pays", "sst2", seed=1, score=0.8, train_rows=4000)
    write_evidence(tmp_path / "pays", "sst2", seed=1, score=0.9)
    assert list(evidence(tmp_path, "pays")["setup"]) == [
        "SST-2, 4,000 rows, bert-small-wiki", "SST-2, bert-small-wiki",
    ]  # fmt: skip


def test_setups_count_the_same_and_missing_ones_are_counted() -> None:
    three, other = [1.0, 1.0, 1.0], [3.0, 3.0, 3.0]
    assert shown({"a": three, "b": other}, 3) == "2.00 [2.00, 2.00] (2 of 3 setups)"
    assert shown({"a": three, "b": [3.0]}, 2) == "1.00 [1.00, 1.00] (1 of 2 setups)", "one seed is no setup"
    assert shown({"a": [1.0], "b": [3.0]}, 2) == "2.00", "nor are two of them, but there is nothing else"
    assert shown({"a": [1.0, 2.0]}) == "1.50 (n = 2)", "two seeds have no interval"
    assert shown({"a": [1.0, 1.0, 1.0]}, digits=1) == "1.0 [1.0, 1.0]"
    assert shown({}, 3) == "-"


def test_missing_cells_are_named() -> None:
    def plan(*done: tuple[str, str]) -> pd.DataFrame:
        rows = [(kind, setup, (kind, setup) in done) for setup in ("RTE", "MRPC", "CoLA") for kind in ("ERM", "SAM")]
        return pd.DataFrame(rows, columns=["kind", "setup", "done"])

    assert missing(plan()) == "No runs yet: every method (RTE; MRPC; CoLA)."
    some = [("ERM", "RTE"), ("SAM", "RTE"), ("ERM", "MRPC")]
    assert missing(plan(*some)) == "No runs yet: SAM (MRPC), every method (CoLA)."
    assert missing(plan(*some, ("SAM", "MRPC"), ("ERM", "CoLA"), ("SAM", "CoLA"))) == ""
    assert missing(plan()[:0]) == ""


def test_the_sweeps_say_what_is_missing(tmp_path: Path) -> None:
    """A planned run is found by its id, and named as its result is."""
    sweeps, results = tmp_path / "configs" / "sweeps" / "evidence", tmp_path / "results"
    sweeps.mkdir(parents=True)
    methods = "{erm: ERM, random: {method: {name: DeltaSAM, weighting: {name: RandomWeights}}}}"
    text = f"tasks: [{{name: sst2, train_rows: 4000}}]\nmodels: [minilm-l6]\nmethods: {methods}\nseeds: [1, 2]\n"
    (sweeps / "pays.yaml").write_text(text)
    (sweeps / "pays-llm.yaml").write_text(text.replace("sst2", "mrpc"))
    config = final_runs(read_sweep(sweeps / "pays.yaml"), {})[0].config
    place = write_evidence(results / "pays-more", "sst2", seed=1, score=0.8, model="minilm-l6", train_rows=4000)
    given = json.loads((place / "result.json").read_text())
    (place / "result.json").write_text(json.dumps({**given, "run_id": config.run_id}))
    found = cells(results, "pays")
    assert list(found["done"]) == [True, False, False, False]
    assert set(found["setup"]) == set(topic(results, "pays")["setup"]) == {"SST-2, 4,000 rows, minilm-l6"}
    assert missing(found) == "No runs yet: δ-SAM, weights shuffled (SST-2, 4,000 rows, minilm-l6)."


def test_a_run_of_another_topic_does_not_count(tmp_path: Path) -> None:
    """The same run in another folder may be older, and lack what the tables of the topic show."""
    sweeps = tmp_path / "configs" / "sweeps" / "evidence"
    sweeps.mkdir(parents=True)
    for name in ("pays", "glue"):
        text = "tasks: [mrpc]\nmodels: [minilm-l6]\nmethods: {erm: ERM}\nseeds: [1, 2]\n"
        (sweeps / f"{name}.yaml").write_text(text)
    runs = final_runs(read_sweep(sweeps / "pays.yaml"), {})
    for folder, run in zip(("pays", "glue"), runs, strict=True):
        place = write_evidence(tmp_path / "results" / folder, "mrpc", seed=run.config.seed, score=0.8)
        given = json.loads((place / "result.json").read_text())
        (place / "result.json").write_text(json.dumps({**given, "run_id": run.config.run_id}))
    found = planned(tmp_path)
    assert list(found[found["sweep"] == "pays"]["done"]) == [True, False]
    assert list(found[found["sweep"] == "glue"]["done"]) == [True, True], "sweeps without a topic share folders"
