"""The configuration of a run: complete, typed, unchanged by YAML; its errors and its id."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.catalogue import METHODS
from deltasam.lab.experiments import REGULARISERS, WEIGHTINGS, ConfigError, RunConfig, resolve
from deltasam.lab.tasks import TASKS

SMALL = {"task": "mrpc", "model": "bert-base-cased"}


def make(**sections: Any) -> RunConfig:
    return RunConfig.from_plain({**SMALL, **sections})


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_survives_yaml(name: str, tmp_path: Path) -> None:
    config = make(method=name)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    again = RunConfig.read(tmp_path / "config.yaml")
    assert again == config
    assert again.run_id == config.run_id
    assert type(again.method) is METHODS[name]


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_survives_yaml(name: str) -> None:
    config = make(task=name)
    assert RunConfig.from_plain(config.to_plain()) == config
    assert config.task == TASKS[name]


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
def test_every_weighting_survives_yaml(name: str) -> None:
    config = make(method={"name": "delta-sam", "weighting": name})
    assert RunConfig.from_plain(config.to_plain()) == config
    assert type(config.method.weighting) is WEIGHTINGS[name]


@pytest.mark.parametrize("name", sorted(REGULARISERS))
def test_every_regulariser_survives_yaml(name: str) -> None:
    config = make(regularisers=[name, {"name": "RDrop", "alpha": 0.3}])
    assert RunConfig.from_plain(config.to_plain()) == config
    assert [one.name for one in config.regularisers] == [name, "RDrop"]


def test_identity_is_what_is_computed() -> None:
    config = make()
    same: dict[str, Any] = {"data": "/elsewhere", "checkpoint_every": 7, "workers": 2, "capture": True}
    other: dict[str, Any] = {
        "task": {"name": "mrpc", "max_length": 64},
        "model": {"path": config.model.path, "dropout": 0.3},
        "method": "sam",
        "regularisers": ["RDrop"],
        "average": "swa",
        "optimizer": {"lr": 2e-5},
        "schedule": {"warmup": 0.1},
        "batch": {"size": 8},
        "precision": "bf16",
        "seed": 1,
        "evaluate_every": "end",
    }
    # Every section is on one side; a forgotten one would give two runs the same id.
    assert {*same, *other, "on_out_of_memory"} == {field.name for field in dataclasses.fields(RunConfig)}
    for section, value in same.items():
        assert make(**{section: value}).run_id == config.run_id, section
    assert make(on_out_of_memory="split").run_id == config.run_id  # not allowed with capture
    for section, value in other.items():
        assert make(**{section: value}).run_id != config.run_id, section
    assert make(method={"name": "SAM", "rho": 0.01}).run_id == make(method="sam").run_id  # the default
    other = config.with_seed(7)
    assert (other, other.run_id) == (make(seed=7), make(seed=7).run_id)


def test_later_wins(tmp_path: Path) -> None:
    (tmp_path / "part.yaml").write_text("method: {name: SAM, rho: 0.1}\nseed: 3\noptimizer: {lr: 1e-5}\n")
    config = resolve(file=tmp_path / "part.yaml", options={**SMALL, "seed": 4}, settings=["method.rho=0.2", "seed=5"])
    assert (config.method.rho, config.seed) == (0.2, 5)
    other = resolve(file=tmp_path / "part.yaml", options=SMALL, method="asam")
    assert other.method.rho == METHODS["ASAM"]().rho  # another method has its own defaults


def test_settings_are_yaml() -> None:
    config = resolve(
        options={"task": "classification", "model": "x"},
        settings=[
            "task.files.train=a.csv",
            "task.text=[title, body]",
            "optimizer.lr=1e-4",
            "method={name: sam, rho: 0.3}",
        ],
    )
    assert config.task.files == {"train": "a.csv"}
    assert config.task.text == ("title", "body")
    assert config.optimizer.lr == 1e-4
    assert config.method.rho == 0.3


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optimizer": {"betas": [0.9]}}, r"optimizer.betas=\[0.9\]: Field required"),
        ({"task": "mrcp"}, r"task: there is no 'mrcp'; did you mean mrpc\?"),
        ({"method": "delta-sma"}, r"method: there is no 'delta-sma'; did you mean DeltaSAM\?"),
        ({"methd": "sam"}, r"methd: unknown section of a run; did you mean method\?"),
        ({"epochs": 1}, r"epochs: unknown section of a run; did you mean schedule.epochs\?"),
        ({"batch_size": 8}, r"did you mean batch.size\?"),
        ({"optimizer": {"learning_rate": 1e-4}}, r"optimizer.learning_rate: unknown option of Optimizer; .*lr, "),
        ({"schedule": {"lr": 1e-4}}, r"schedule.lr: unknown option of Schedule; did you mean optimizer.lr\?"),
        ({"optimizer": {"name": "adam"}}, r"optimizer.name: unknown option of Optimizer; there are lr, "),
        ({"model": {"name": "bert"}}, r"model.name: unknown option of ModelConfig; there are path, dropout"),
        ({"optimizer": {"seed": 1}, "method": "delta-sam"}, r"optimizer.seed: .*; did you mean seed\?"),
        ({"batch": {"workers": 1}}, r"batch.workers: .*; did you mean workers\?"),
        ({"method": "sam", "rho": 0.1}, r"did you mean method.rho\?"),
        ({"task": "classification", "text": "review"}, r"did you mean task.text\?"),
        ({"method": {"name": "sam", "roh": 1}}, r"method.roh: unknown option of SAM; did you mean rho\?"),
        ({"method": {"name": "sam", "rho": -1}}, r"method: rho=-1.0 must be"),
        ({"method": {"rho": 1}}, r"method: `name` is missing"),
        ({"method": 3}, r"method=3: must be a name"),
        (
            {"method": {"name": "delta-sam", "weighting": "Uniforn"}},
            r"weighting: there is no 'Uniforn'; did you mean Uniform\?",
        ),
        ({"method": {"name": "sam", "params": "non"}}, r"method.params='non': Input should be 'trained', 'all'"),
        ({"optimizer": {"lr": "fast"}}, r"optimizer.lr='fast': .*number"),
        ({"optimizer": {"lr": True}}, r"optimizer.lr=True: must be a number"),
        ({"optimizer": {"lr": float("nan")}}, r"optimizer: lr=nan must be"),
        ({"task": {"name": "classification", "files": "a.csv"}}, r"task.files='a.csv': .* valid dictionary"),
        ({"schedule": {"epochs": 0}}, r"schedule: epochs=0"),
        ({"schedule": {"steps": 0}}, r"schedule: steps=0"),
        ({"schedule": {"warmup": 100}}, r"use warmup_steps"),
        ({"schedule": 3}, r"schedule=3: must be a mapping"),
        ({"batch": {"size": 0}}, r"batch: size=0 must be"),
        ({"model": {"path": "x", "dropout": 1.0}}, r"model: dropout=1.0"),
        (
            {"model": {"path": "x", "droput": 0.1}},
            r"model.droput: unknown option of ModelConfig; did you mean dropout\?",
        ),
        ({"precision": "fp8"}, r"^precision='fp8'"),
        ({"evaluate_every": "never"}, r"^evaluate_every='never': Input should be 'epoch' or 'end'; or .* integer"),
        ({"regularisers": ["rdorp"]}, r"regularisers.0: there is no 'rdorp'; did you mean RDrop\?"),
        ({"regularisers": [{"name": "RDrop", "alpha": -1}]}, r"regularisers.0: RDrop\(alpha=-1"),
        *(
            ({"regularisers": value}, r"^regularisers=.*: must be a name, a mapping")
            for value in (1, 2.5, True, {"RDrop"})
        ),
        ({"evaluate_every": 0}, r"^evaluate_every=0"),
        ({"optimizer": {"lr": 1e-8}}, r"optimizer.lr=1e-08 must be greater than schedule.lr_end=1e-07"),
        ({"task": {"name": "mrpc", "max_length": 0}}, r"task: task.max_length=0"),
        ({"model": None}, r"the run has no model; set it by --model"),
    ],
)
def test_mistakes(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**sections)


def test_mistakes_in_files_and_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(file=tmp_path / "nowhere.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        resolve(file=tmp_path / "list.yaml")
    (tmp_path / "rows.csv").write_text("text,label\n" * 10_000)  # not all of it
    with pytest.raises(ConfigError, match=r"must hold a mapping such as `name: value`, not 'text,.{,30}$"):
        resolve(file=tmp_path / "rows.csv")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match="not YAML"):
        resolve(file=tmp_path / "broken.yaml")
    (tmp_path / "broken.yaml").write_text("task: mrpc\n  model: x\n")
    with pytest.raises(ConfigError, match=r"broken.yaml: not YAML \(mapping values are not allowed here, line 2\)"):
        resolve(file=tmp_path / "broken.yaml")
    (tmp_path / "twice.yaml").write_text("task: mrpc\nmethod: {name: SAM, rho: 0.1, rho: 0.2}\n")
    with pytest.raises(ConfigError, match=r"twice.yaml: duplicate key 'rho' in line 2"):
        resolve(file=tmp_path / "twice.yaml")
    with pytest.raises(ConfigError, match=r"section.option=value"):
        resolve(options=SMALL, settings=["seed"])
    with pytest.raises(ConfigError, match="no preset 'glue/bert-base/mrcp'; did you mean glue/bert-base/mrpc"):
        resolve(preset="glue/bert-base/mrcp")


def test_functions_cannot_be_written_to_a_file() -> None:
    from dataclasses import replace

    from deltasam.methods import SAM

    config = replace(make(), method=SAM(params=lambda name, parameter: True))
    with pytest.raises(ConfigError, match="cannot be written to a configuration file"):
        config.to_yaml()


def test_schedule_counts_updates() -> None:
    config = make(batch={"size": 16, "accumulation": 2}, schedule={"epochs": 3, "warmup": 0.1})
    assert config.batch.updates_per_epoch(100) == 4  # 7 batches, two per update
    assert config.schedule.total(4) == 12
    assert config.schedule.warmup_of(12) == 2
    assert make(schedule={"epochs": 0.3}).schedule.total(4) == 2  # rounded up
    assert make(schedule={"warmup": 1.0}).schedule.warmup_of(5) == 4  # one update at the full rate remains
    assert make(schedule={"steps": 50, "warmup_steps": 0}).schedule.total(4) == 50
    assert make(batch={"size": 16, "drop_last": True}).batch.updates_per_epoch(100) == 6


def test_a_later_option_changes_the_id_only_if_it_is_used() -> None:
    plain = make(method={"name": "PerInstanceSAM"})
    assert "factors" in plain.to_plain()["method"]
    assert make(method={"name": "PerInstanceSAM", "factors": "exact"}).run_id == plain.run_id
    assert make(method={"name": "PerInstanceSAM", "factors": "bfloat16"}).run_id != plain.run_id


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_outside_of_the_range_of_numpy(seed: int) -> None:
    with pytest.raises(ConfigError, match=rf"seed={seed} must be in 0\.\.4294967295"):
        RunConfig.from_plain({"task": "mrpc", "model": "bert-base-cased", "seed": seed})
