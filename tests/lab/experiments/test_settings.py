"""How the settings of a run are applied: seeds, optimizer, schedule; and the times in its result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from deltasam.lab.experiments import RunConfig, prepare, run
from deltasam.lab.experiments._trainer import RunTrainer, arguments
from deltasam.lab.tasks import SentenceTask
from deltasam.objectives import Classification
from deltasam.objectives.regularisers import SMART, RDrop
from helpers.clocks import StoodClock
from helpers.fault_runs import Interrupted
from helpers.folders import classification_task
from helpers.pretrained import bert_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parts")
    task, model = classification_task(folder), str(bert_folder(folder / "bert"))
    return {"task": task, "model": model, "batch": {"size": 4}, "schedule": {"steps": 4}}


def made(plain: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.from_plain({**plain, **sections})


class Given(BaseException):
    """Ends a run when its trainer is created."""


def given(config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the arguments of the trainer, and ``encoded``: the seed for encoding the rows."""
    found: dict[str, Any] = {}
    encode = SentenceTask.encode

    def encoded(self: SentenceTask, *args: Any, seed: int = 0) -> Any:
        found["encoded"] = seed
        return encode(self, *args, seed=seed)

    def trainer(**parts: Any) -> None:
        found.update(parts)
        raise Given

    with monkeypatch.context() as patch:
        patch.setattr(SentenceTask, "encode", encoded)
        patch.setattr("deltasam.lab.experiments._trainer.RunTrainer", trainer)
        with pytest.raises(Given):
            run(config, folder)
    return found


def test_the_seed_reaches_everything_random(
    plain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"name": "DeltaSAM", "seed": 100}
    heads = []
    for number, seed in enumerate((1, 2, 1)):
        found = given(made(plain, method=method, seed=seed), tmp_path / str(number), monkeypatch)
        assert (found["args"].seed, found["encoded"], found["method"].seed) == (seed, seed, 100 + seed)
        heads.append(found["model"].classifier.weight.detach())
    assert torch.equal(heads[0], heads[2])
    assert not torch.equal(heads[0], heads[1])


def test_settings_reach_the_arguments_of_the_trainer(plain: dict[str, Any], tmp_path: Path) -> None:
    optimizer = {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-5, "weight_decay": 0.3, "max_grad_norm": 0.5}
    sections = {"batch": {"size": 4, "accumulation": 3, "drop_last": True}, "schedule": {"warmup_steps": 2}}
    args = arguments(made(plain, optimizer=optimizer, **sections), 10, tmp_path, tensorboard=False)
    assert (args.learning_rate, args.adam_beta1, args.adam_beta2, args.max_grad_norm) == (3e-4, 0.8, 0.95, 0.5)
    assert (args.max_steps, args.warmup_steps, args.lr_scheduler_kwargs) == (10, 2, {"lr_end": 1e-7, "power": 1.0})
    assert (args.adam_epsilon, args.weight_decay, args.per_device_train_batch_size) == (1e-5, 0.3, 4)
    assert (args.gradient_accumulation_steps, args.dataloader_drop_last) == (3, True)


def test_regularisers_wrap_the_objective_in_order(plain: dict[str, Any]) -> None:
    outer: Any = prepare(made(plain, regularisers=["RDrop", "SMART"])).objective()
    assert isinstance(outer, SMART)
    assert outer.total_steps == 4  # set by the run
    assert isinstance(outer.objective, RDrop)
    assert isinstance(outer.objective.objective, Classification)


RATES = {"polynomial": 0.75 + 0.25 * 0.1, "linear": 0.75, "cosine": (1 + 0.5**0.5) / 2, "constant": 1.0}


@pytest.mark.parametrize("kind", RATES)
def test_schedules_by_their_rate_after_a_quarter(kind: str, plain: dict[str, Any], tmp_path: Path) -> None:
    schedule = {"kind": kind, "lr_end": 0.1, "warmup_steps": 0}
    args = arguments(made(plain, optimizer={"lr": 1.0}, schedule=schedule), 100, tmp_path, tensorboard=False)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    scheduler = transformers.get_scheduler(
        args.lr_scheduler_type, optimizer, args.warmup_steps, 100, scheduler_specific_kwargs=args.lr_scheduler_kwargs
    )
    for _ in range(25):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(RATES[kind])]


@pytest.mark.parametrize("decay_all", [True, False])
def test_weight_decay(decay_all: bool, plain: dict[str, Any]) -> None:
    model = transformers.AutoModel.from_pretrained(plain["model"])
    trainer = RunTrainer.__new__(RunTrainer)
    trainer._config = made(plain, optimizer={"decay_all": decay_all})
    names = {name for name, _ in model.named_parameters()}
    spared = {name for name in names if name.endswith("bias") or "LayerNorm" in name}
    assert 0 < len(spared) < len(names)
    assert set(trainer.get_decay_parameter_names(model)) == (names if decay_all else names - spared)


@pytest.mark.parametrize("interrupted", [False, True])
def test_times_without_interruptions(
    interrupted: bool, plain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One second per update and eight per evaluation, with or without an interruption."""
    clock = StoodClock(monkeypatch)
    update, evaluation, stop_at = clock.work(1), clock.work(8), 3 if interrupted else 0
    evaluate = SentenceTask.evaluate

    def evaluated(*args: Any, **options: Any) -> Any:
        evaluation()
        return evaluate(*args, **options)

    def watch(step: int, *_: Any) -> None:
        update()
        if step == stop_at:
            raise Interrupted

    monkeypatch.setattr(SentenceTask, "evaluate", evaluated)
    one = made(plain, evaluate_every=1, checkpoint_every=2)
    if interrupted:
        with pytest.raises(Interrupted):
            run(one, tmp_path / "run", watch=watch)
        clock.work(1000)()  # until it is started again
        stop_at = 0
    result = run(one, tmp_path / "run", watch=watch)
    assert (result.train_seconds, result.eval_seconds) == (4.0, 32.0)


def test_the_result_belongs_to_the_final_weights(plain: dict[str, Any], tmp_path: Path) -> None:
    """Older Trainers evaluate after every second update only, although the third is the last."""
    result = run(made(plain, schedule={"steps": 3}, evaluate_every=2), tmp_path / "run")
    entries = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    evaluations = [entry for entry in entries if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [2, 3]
    assert result.metrics["loss"] == evaluations[1]["eval_loss"] != evaluations[0]["eval_loss"]


@pytest.mark.parametrize(("every", "logged"), [(2, [2, 4, 6]), ("epoch", [3, 6])])
def test_a_log_entry_at_every_checkpoint(
    every: int | str, logged: list[int], plain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the entry of an interrupted run would be the mean of fewer updates."""
    monkeypatch.setattr("deltasam.lab.experiments._trainer.LOG_ENTRIES", 1)
    cadence = {"checkpoint_every": every, "evaluate_every": "end"}
    run(made(plain, schedule={"steps": 6}, batch={"size": 8}, **cadence), tmp_path / "run")
    entries = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if "loss" in entry] == logged
