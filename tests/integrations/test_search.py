"""``hyperparameter_search``, which stores the score of a trial in ``trainer.objective``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltasam import WeightAverage
from deltasam.integrations import MethodTrainer, WeightAverageCallback
from deltasam.methods import SAM
from deltasam.objectives import Classification
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, weights

optuna = pytest.importorskip("optuna", reason="optuna is not installed (extra search)")


@pytest.mark.parametrize("strategy", ["no", "steps"], ids=["scored-at-the-end", "scored-on-the-way"])
def test_trials_train_by_the_objective_and_return_their_score(strategy: str, tmp_path: Path) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def model_init() -> Any:
        return fresh()

    def trainer(**options: Any) -> MethodTrainer:
        args = arguments(tmp_path, eval_strategy=strategy, eval_steps=2, max_steps=4, **options)
        data = classification_data()
        return MethodTrainer(model_init=model_init, args=args, method=SAM(), train_dataset=data, eval_dataset=data)

    searching = trainer()
    best = searching.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)},
        n_trials=2,
        backend="optuna",
        direction="minimize",
    )
    assert best.objective > 0
    assert searching.objective == Classification()
    alone = trainer(learning_rate=best.hyperparameters["learning_rate"])
    alone.train()
    assert alone.evaluate()["eval_loss"] == pytest.approx(best.objective)


def test_an_objective_may_be_assigned_afterwards(tmp_path: Path) -> None:
    ends = []
    for smoothing in (None, 0.3):
        trainer = MethodTrainer(
            model=fresh(),
            args=arguments(tmp_path),
            method=SAM(),
            objective=Classification(label_smoothing=0.3) if smoothing is None else None,
            train_dataset=classification_data(),
        )
        if smoothing is not None:
            trainer.objective = Classification(label_smoothing=smoothing)
        trainer.train()
        ends.append(weights(trainer.model))
    assert_same_bits(*ends)


def test_an_average_adds_no_checkpoint_beside_those_of_the_trials(tmp_path: Path) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    data = classification_data()
    trainer = MethodTrainer(
        model_init=lambda trial: fresh(),
        args=arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2),
        method=SAM(),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[WeightAverageCallback(WeightAverage(decay=0.5))],
    )
    trainer.hyperparameter_search(hp_space=lambda trial: {}, n_trials=1, backend="optuna")
    assert list(tmp_path.glob("run-*/checkpoint-2"))
    assert not list(tmp_path.glob("checkpoint-*"))
