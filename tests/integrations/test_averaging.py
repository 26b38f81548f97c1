"""The average of the weights in trainers: what is trained, evaluated, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from deltasam import SAM, WeightAverage
from deltasam.integrations import MethodTrainer, WeightAverageCallback
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, weights


class Noting(TrainerCallback):
    """Notes the weights after every update, and at every evaluation; to be put before the average."""

    def __init__(self) -> None:
        self.trained: list[dict[str, Tensor]] = []
        self.evaluated: list[tuple[int, dict[str, Tensor]]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.trained.append(weights(model))

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.evaluated.append((state.global_step, weights(model)))


def trainer_for(folder: Path, kind: type[Trainer], average: WeightAverage | None, **options: Any) -> Any:
    noting = Noting()
    averages = [] if average is None else [WeightAverageCallback(average)]
    more = {"method": SAM(rho=0.1)} if kind is MethodTrainer else {}
    data = classification_data()
    trainer = kind(
        model=fresh(),
        args=arguments(folder, **{"max_steps": 8, "eval_strategy": "steps", "eval_steps": 3, **options}),
        train_dataset=data,
        eval_dataset={"one": data[:4], "two": data[4:8]},
        callbacks=[noting, *averages],
        **more,
    )
    trainer.noting = noting
    return trainer


def mean(seen: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name].double() for each in seen]).mean(0) for name in seen[0]}


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Trainer, MethodTrainer])
def test_training_is_undisturbed_and_the_average_is_evaluated_and_kept(kind: type[Trainer], tmp_path: Path) -> None:
    plain = trainer_for(tmp_path / "plain", kind, None)
    plain.train()
    averaged = trainer_for(tmp_path / "averaged", kind, WeightAverage(kind="swa", start=0.5))
    averaged.train()
    for one, other in zip(plain.noting.trained, averaged.noting.trained, strict=True):
        assert_same_bits(one, other)
    trained = averaged.noting.trained
    assert [step for step, _ in averaged.noting.evaluated][:4] == [3, 3, 6, 6]  # two sets; some versions add the end
    for step, found in averaged.noting.evaluated:
        close(found, mean(trained[4:step] or trained[step - 1 : step]))  # at 3 there is no average yet
    close(weights(averaged.model), mean(trained[4:]))


@pytest.mark.parametrize("kind", [Trainer, MethodTrainer])
@pytest.mark.parametrize("average", [WeightAverage(decay=0.5), WeightAverage(kind="swa", start=0.25)], ids=str)
def test_a_resumed_training_equals_an_uninterrupted_one(
    kind: type[Trainer], average: WeightAverage, tmp_path: Path
) -> None:
    options = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "no"}
    whole, resumed = (trainer_for(tmp_path, kind, average, **options) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for one, other in zip(whole.noting.trained[4:], resumed.noting.trained, strict=True):
        assert_same_bits(one, other)
    assert_same_bits(weights(whole.model), weights(resumed.model))


def test_a_resumed_training_that_evaluates_first_shows_the_average(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "no"}
    average = WeightAverage(kind="swa", start=0.0)
    whole = trainer_for(tmp_path, Trainer, average, **options)
    whole.train()
    resumed = trainer_for(tmp_path, Trainer, average, **options, eval_on_start=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    (step, found), *_ = resumed.noting.evaluated
    assert step == 4
    close(found, mean(whole.noting.trained[:4]))


def test_a_checkpoint_holds_the_average_as_the_model(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "no"}
    trainer = trainer_for(tmp_path, Trainer, WeightAverage(kind="swa", start=0.0), **options)
    trainer.train()
    saved = type(trainer.model).from_pretrained(tmp_path / "checkpoint-4")
    close(weights(saved), mean(trainer.noting.trained[:4]))


def test_the_best_average_is_kept(tmp_path: Path) -> None:
    options = {
        "save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_one_loss", "greater_is_better": True,  # the worst one: the first
    }  # fmt: skip
    trainer = trainer_for(tmp_path, Trainer, WeightAverage(kind="swa", start=0.0), **options)
    trainer.train()
    best = int(Path(trainer.state.best_model_checkpoint).name.rpartition("-")[2])
    assert best < 8
    close(weights(trainer.model), mean(trainer.noting.trained[:best]))


def test_wrong_checkpoints(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "no"}
    trainer_for(tmp_path / "one", Trainer, None, **options).train()
    resumed = trainer_for(tmp_path / "two", Trainer, WeightAverage(), **options)
    with pytest.raises(FileNotFoundError, match=r"weight_average.json does not exist.*checkpoint=\.\.\."):
        resumed.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-4"))
    whole = trainer_for(tmp_path / "three", Trainer, WeightAverage(), **options)
    whole.train()
    elsewhere = trainer_for(tmp_path / "four", Trainer, None, **options)
    folder = tmp_path / "three" / "checkpoint-4"
    elsewhere.add_callback(WeightAverageCallback(WeightAverage(), checkpoint=folder))
    elsewhere.train(resume_from_checkpoint=str(folder))
    assert_same_bits(weights(whole.model), weights(elsewhere.model))


def test_an_optimizer_that_moves_the_weights_for_evaluations_is_refused(tmp_path: Path) -> None:
    class ScheduleFree(torch.optim.SGD):
        def train(self) -> None: ...

        def eval(self) -> None: ...

    model = fresh()
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path),
        train_dataset=classification_data(),
        optimizers=(ScheduleFree(model.parameters(), lr=0.1), None),  # type: ignore[arg-type]
        callbacks=[WeightAverageCallback(WeightAverage())],
    )
    with pytest.raises(ValueError, match=r"WeightAverageCallback .*ScheduleFree.*another optimizer"):
        trainer.train()
