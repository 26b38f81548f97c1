"""Expanding a sweep file to its runs, and choosing a point of the grid."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.experiments import ConfigError, Result
from deltasam.lab.experiments.plain import merge
from deltasam.lab.sweeps import Planned, Sweep, final_runs, read_sweep, select, tuning_runs
from deltasam.lab.sweeps._sweep import _record_choice
from helpers.data import REPOSITORY
from helpers.folders import tiny_bert_folder

FILES = sorted((REPOSITORY / "configs/sweeps").rglob("*.yaml"))
PLAIN = {
    "tasks": ["docstrings"],
    "models": ["minilm-l6"],
    "methods": ["erm", "delta-sam"],
    "grid": {"delta-sam": {"method.rho": [0.01, 0.05], "method.eta": [1e-4, 1e-3]}},
    "seeds": [1, 2, 3],
}


def sweep(**changes: Any) -> Sweep:
    return Sweep.from_plain({**PLAIN, **changes}, "test")


def result(planned: Planned, value: float, **changes: Any) -> Result:
    values = {f.name: "" for f in dataclasses.fields(Result)}
    values |= {"primary_value": value, "higher_is_better": True, "seed": planned.config.seed, "metrics": {}}
    return Result(**{**values, **changes})


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_sweep_file_describes_distinct_runs(path: Path) -> None:
    found = read_sweep(path)
    if found.name == "sts-mirror-roberta":
        assert len(tuning_runs(found)) == 6 + 4 + 16 + 24 + 96
    named = merge({"optimizer": {"lr": 1e-4}}, found.common)  # some set it in the grid
    runs = final_runs(dataclasses.replace(found, grid={}, tune=None, common=named), {})
    assert len({planned.config.run_id for planned in runs}) == len(runs) > 0


def test_the_papers_grid_for_glue() -> None:
    (path,) = [path for path in FILES if path.stem == "glue-bert-base"]
    found = dataclasses.replace(read_sweep(path), presets=("glue/bert-base/rte",))
    rhos = {(p.config.method.rho, p.config.method.eta) for p in tuning_runs(found) if p.method == "delta-sam"}
    assert rhos == {(rho, eta) for rho in (0.01, 0.02, 0.05) for eta in (1e-4, 2e-4, 5e-4, 1e-3)}


def test_without_a_choice_every_point_has_every_seed() -> None:
    runs = final_runs(sweep(), {})
    assert len(runs) == 3 + 4 * 3
    assert tuning_runs(sweep()) == []


def test_tuning_chooses_the_best_mean_and_keeps_the_ids_of_its_runs() -> None:
    it = sweep(tune={"seeds": [1, 2]})
    tuning = tuning_runs(it)
    assert len(tuning) == 4 * 2
    assert {p.method for p in final_runs(it, {})} == {"erm"}  # nothing is chosen for delta-sam yet
    scores = {0.01: 0.7, 0.05: 0.9}
    pairs = [(p, result(p, scores[p.config.method.rho] + p.config.method.eta)) for p in tuning]
    chosen = select(pairs)
    assert dict(chosen["docstrings/minilm-l6", "delta-sam"]) == {"method.rho": 0.05, "method.eta": 1e-3}
    final = [p for p in final_runs(it, chosen) if p.method == "delta-sam"]
    assert [p.config.seed for p in final] == [1, 2, 3]
    assert {p.config.run_id for p in final[:2]} <= {p.config.run_id for p in tuning}  # not run again

    lower = [(p, result(p, r.primary_value, higher_is_better=False)) for p, r in pairs]
    assert dict(select(lower)["docstrings/minilm-l6", "delta-sam"]) == {"method.rho": 0.01, "method.eta": 1e-4}


def test_the_mean_decides_not_the_best_seed_and_among_equals_the_first() -> None:
    it = sweep(tune={"seeds": [1, 2]}, grid={"delta-sam": {"method.rho": [0.01, 0.05, 0.1]}})
    scores = {(0.01, 1): 0.9, (0.01, 2): 0.3, (0.05, 1): 0.75, (0.05, 2): 0.75, (0.1, 1): 1.0, (0.1, 2): 0.5}
    pairs = [(p, result(p, scores[p.config.method.rho, p.config.seed])) for p in tuning_runs(it)]
    assert list(select(pairs).values()) == [(("method.rho", 0.05),)]


def test_a_point_with_a_missing_run_is_excluded() -> None:
    tuning = tuning_runs(sweep(tune={"seeds": [1, 2]}))
    pairs = [(p, result(p, 1.0 if p.config.method.rho == 0.05 else 0.5)) for p in tuning]
    pairs = [(p, r) for p, r in pairs if not (p.config.method.rho == 0.05 and p.config.seed == 2)]
    assert dict(select(pairs)["docstrings/minilm-l6", "delta-sam"])["method.rho"] == 0.01


def test_tuning_on_another_split_makes_other_runs() -> None:
    it = sweep(tune={"seeds": [1], "common": {"task": {"eval_split": "test"}}})
    assert {p.config.task.eval_split for p in tuning_runs(it)} == {"test"}
    assert {p.config.task.eval_split for p in final_runs(it, {})} == {"validation"}


def test_methods_with_sections_and_grids_that_reach_into_lists() -> None:
    methods = {"noisy": {"method": "sam", "regularisers": [{"name": "EmbeddingNoise", "scale": 0.1}]}}
    it = sweep(methods=methods, grid={"noisy": {"regularisers.0.scale": [0.1, 0.2]}}, seeds=[1])
    assert [dict(p.config.regularisers[0].options)["scale"] for p in final_runs(it, {})] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": [1]}, "sweep.seed: unknown option of Sweep; did you mean seeds"),
        ({"models": []}, "tasks and models go together"),
        ({"tasks": [], "models": []}, "no setup"),
        ({"seeds": [1, 1]}, "duplicates"),
        (
            {"methods": ["sam"], "grid": {"sam": {"method.rho": [0.1, 0.2, 0.2]}}},
            r"rho=\[0.1, 0.2, 0.2\] must not",
        ),
        ({"methods": ["sam"], "tune": {"seeds": [1, 1]}}, r"tune: seeds=\[1, 1\] must not contain duplicates"),
        ({"presets": ["glue/bert-base/mrpc"] * 2}, r"presets=.* must not contain duplicates"),
        ({"seeds": []}, "at least one"),
        (
            {"grid": {"deltasam": {"method.rho": [1]}}},
            "grid.deltasam: not a method .*did you mean delta-sam",
        ),
        ({"grid": {"erm": {"method.rho": []}}}, "at least one value"),
        (
            {"methods": ["sam"], "grid": {"sam": {"method.rho": ["1e-2", 0.01]}}},
            r"grid.sam.method.rho=\['1e-2', 0.01\] must not contain duplicates",
        ),
        ({"grid": {"erm": {"method.rho": 0.1}}}, r"^sweep.grid.erm.method.rho=0.1: Input should be a valid list"),
        ({"grid": {"method.rho": [0.1]}}, r"^sweep.grid.method.rho=\[0.1\]: Input should be a valid dictionary"),
        ({"grid": ["method.rho"]}, r"^sweep.grid=\['method.rho'\]: Input should be a valid dictionary"),
        ({"tune": {"seeds": []}}, "at least one seed"),
        ({"common": {"seed": 3}}, "common.seed has no effect"),
        ({"methods": {"erm": {"seed": 3}}, "grid": {}}, "methods.erm.seed has no effect"),
        ({"grid": {"erm": {"seed": [1, 2]}}}, "grid.erm.seed has no effect"),
        ({"tune": {"seeds": [1], "common": {"seed": 3}}}, "tune.common.seed has no effect"),
        ({"methods": "erm"}, "must be a list"),
        ({"keep": "everything"}, "keep='everything'"),
        ({"seeds": 1}, "sweep.seeds=1: Input should be a valid list"),
        ({"tune": [1]}, r"tune=\[1\]: must be a mapping"),
        ({"risk": {"roh": 0.1}}, "risk.roh: unknown option of Risk; did you mean rho"),
        ({"risk": {"rho": "x"}}, "risk.rho='x': .*number"),
        ({"risk": {"rho": -1}}, "risk: rho=-1.0 must be"),
        ({"risk": {"rows": 0}}, "risk: rows=0 must be"),
        ({"risk": 0.05}, "risk=0.05: must be a mapping"),
    ],
)
def test_mistakes_in_the_file_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"methods": ["samm"], "grid": {}},
            "minilm-l6, samm: method: there is no 'samm'; did you mean SAM",
        ),
        ({"grid": {"erm": {"method.rho": [0.1]}}}, "docstrings/minilm-l6, erm: method.rho: unknown option of ERM"),
        ({"grid": {"erm": {"regularisers.0.scale": [0.1]}}}, "regularisers.0.scale"),
        ({"grid": {"delta-sam": {"methd.rho": [0.1, 0.2]}}}, "methd.rho: there is no 'methd'; did you mean method"),
        (
            {"grid": {"delta-sam": {"method.weigting.samples": [1, 2]}}},
            "method.weigting.samples: there is no 'weigting'; did you mean weighting",
        ),
    ],
)
def test_mistakes_in_the_runs_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        final_runs(sweep(**changes), {})


@pytest.mark.parametrize("rhos", [[0.01, 0.05], [0.05, 0.01]])
def test_a_point_that_diverged_is_not_chosen(rhos: list[float]) -> None:
    it = sweep(tune={"seeds": [1]}, grid={"delta-sam": {"method.rho": rhos}})
    pairs = [(one, result(one, float("nan") if one.config.method.rho == 0.01 else 0.5)) for one in tuning_runs(it)]
    assert list(select(pairs).values()) == [(("method.rho", 0.05),)]


def test_the_majority_class_of_weights_that_are_not_finite_is_not_a_score() -> None:
    it = sweep(tune={"seeds": [1]}, grid={"delta-sam": {"method.rho": [0.01, 0.05]}})
    found = {0.01: (0.7, {"loss": float("nan")}), 0.05: (0.6, {"loss": 0.5})}  # tables omit the first, too
    pairs = []
    for one in tuning_runs(it):
        value, metrics = found[one.config.method.rho]
        pairs.append((one, result(one, value, metrics=metrics)))
    assert list(select(pairs).values()) == [(("method.rho", 0.05),)]


def test_where_every_point_diverged_nothing_is_chosen() -> None:
    it = sweep(tune={"seeds": [1]})
    assert select([(one, result(one, float("nan"))) for one in tuning_runs(it)]) == {}


def test_versions_of_one_task_and_of_one_model_are_separate_setups() -> None:
    tasks = [{"name": "docstrings", "max_length": length} for length in (16, 32)]
    models = [{"path": "minilm-l6", "dropout": dropout} for dropout in (0.0, 0.3)]
    runs = final_runs(sweep(tasks=tasks, models=models, methods=["erm"], grid={}, seeds=[1]), {})
    assert {(one.config.task.max_length, one.config.model.dropout) for one in runs} == {
        (16, 0.0), (16, 0.3), (32, 0.0), (32, 0.3)
    }  # fmt: skip
    assert [one.setup for one in runs][:2] == ["docstrings/minilm-l6", "docstrings/minilm-l6 (2)"]
    assert len({one.setup for one in runs}) == len({one.config.run_id for one in runs}) == 4


def test_the_same_task_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tasks=\['docstrings'.* duplicates"):
        final_runs(sweep(tasks=["docstrings", "docstrings"]), {})


def test_a_method_must_be_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"methods.sam=\[1, 2\]: must be"):
        sweep(methods={"sam": [1, 2]})


def test_sweeps_of_one_folder_keep_each_others_choices(tmp_path: Path) -> None:
    _record_choice(tmp_path, {("qnli", "sam"): (("method.rho", 0.01),), ("qnli", "freelb"): (("method.adv_lr", 0.1),)})
    _record_choice(tmp_path, {("sst2", "sam"): (("method.rho", 0.05),), ("qnli", "sam"): (("method.rho", 0.02),)})
    found = json.loads((tmp_path / "selection.json").read_text())
    assert sorted((line["setup"], line["method"], line.get("method.rho")) for line in found) == [
        ("qnli", "freelb", None), ("qnli", "sam", 0.02), ("sst2", "sam", 0.05),
    ]  # fmt: skip
    for damaged in ("[", '{"setup": 1}', '["qnli"]'):
        (tmp_path / "selection.json").write_text(damaged)
        _record_choice(tmp_path, {("qnli", "sam"): (("method.rho", 0.02),)})
        assert len(json.loads((tmp_path / "selection.json").read_text())) == 1


def test_names_of_methods_and_setups_in_a_sweep(tmp_path: Path) -> None:
    models = [str(tiny_bert_folder(tmp_path / place / "tiny")) for place in ("a", "b")]
    runs = final_runs(sweep(models=models, methods=["plain", "per-instance"], grid={}, seeds=[1]), {})
    assert [type(planned.config.method).__name__ for planned in runs] == ["ERM", "PerInstanceSAM"] * 2
    assert {planned.setup for planned in runs} == {"docstrings/tiny", "docstrings/tiny (2)"}  # no path of a machine
    assert {planned.config.optimizer.lr for planned in runs} == {1e-4}  # chosen by the size of the model


def test_the_former_word_for_keeping_everything() -> None:
    assert sweep(keep="all").keep == "checkpoints"
    with pytest.raises(ConfigError, match="keep"):
        sweep(keep="nothing")
