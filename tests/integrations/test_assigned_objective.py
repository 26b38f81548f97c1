"""``trainer.objective = ...`` after construction: the same checks and the same training."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from deltasam.integrations import MethodTrainer
from deltasam.methods import SAM
from deltasam.objectives import Classification, Contrastive, Objective
from deltasam.objectives.regularisers import RDrop
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, weights


class Tempered(Classification, nn.Module):
    """An objective with a trainable weight."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().losses(outputs * self.temperature, batch)


def trainer_for(folder: Path, *, objective: Any = None, callbacks: Any = None, **options: Any) -> MethodTrainer:
    ours = {name: options.pop(name) for name in ("capture", "on_out_of_memory") if name in options}
    args = arguments(folder, **options)
    common = {"method": SAM(rho=0.1), "train_dataset": classification_data(), "callbacks": callbacks}
    return MethodTrainer(model=fresh(), args=args, objective=objective, **common, **ours)


@pytest.mark.parametrize(
    ("options", "objective", "error", "message"),
    [
        ({}, None, TypeError, "objective=None"),
        ({}, Classification, TypeError, "objective=Classification"),
        ({}, nn.CrossEntropyLoss(reduction="none"), TypeError, "objective=CrossEntropyLoss"),
        ({"capture": True}, Tempered(), ValueError, "objective=Tempered .*capture=False"),
        (
            {"label_smoothing_factor": 0.1},
            Classification(),
            ValueError,
            "label_smoothing_factor=0.1",
        ),
        ({"on_out_of_memory": "split"}, Contrastive(), ValueError, "'split' .*Contrastive"),
    ],
    ids=["none", "class", "criterion", "recorded", "smoothing", "split"],
)
def test_assignment_makes_the_checks_of_the_constructor(
    options: dict[str, Any], objective: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    trainer = trainer_for(tmp_path, **options)
    before = trainer.objective
    with pytest.raises(error, match=message):
        trainer.objective = objective
    assert trainer.objective is before


def test_gradients_of_an_assigned_objective_are_cleared(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Noting(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seen.append(objective.temperature.grad)

    objective, trainer = Tempered(), trainer_for(tmp_path, callbacks=[Noting])
    for _ in range(2):  # assigning twice adds one callback
        trainer.objective = objective
    assert sum(type(each).__name__ == "ZeroAllGradients" for each in trainer.callback_handler.callbacks) == 1
    trainer.optimizer = torch.optim.SGD([*trainer.model.parameters(), *objective.parameters()], lr=1e-2)
    trainer.train()
    assert seen
    assert set(seen) == {None}
    assert objective.temperature.item() != 1


def test_the_model_inside_an_objective_does_not_count_as_its_weights(tmp_path: Path) -> None:
    class Holding(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

    trainer = trainer_for(tmp_path, capture=True)
    trainer.objective = Holding(trainer.model)


def test_another_loss_than_the_inferred_one_is_not_compared_with_the_models(tmp_path: Path) -> None:
    """Only an inferred objective has to match the model's loss."""

    class Tenfold(Classification):
        def losses(self, outputs: Tensor, batch: Any) -> Tensor:
            return 10 * super().losses(outputs, batch)

    ends = []
    for later in (False, True):
        trainer = trainer_for(tmp_path, objective=None if later else Tenfold())
        if later:
            trainer.objective = Tenfold()
        trainer.train()
        ends.append(weights(trainer.model))
    assert_same_bits(*ends)


def test_the_inferred_objective_inside_a_regulariser_is_still_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_for(tmp_path)
    forward = trainer.model.forward

    @wraps(forward)  # Trainer inspects its arguments
    def doubled(**batch: Any) -> Any:
        outputs = forward(**batch)
        return outputs if outputs.loss is None else type(outputs)(loss=2 * outputs.loss, logits=outputs.logits)

    monkeypatch.setattr(trainer.model, "forward", doubled)
    trainer.objective = RDrop(trainer.objective)
    with pytest.raises(ValueError, match=r"computes the loss .* Classification"):
        trainer.train()


def test_a_callable_is_an_objective_during_a_search_too(tmp_path: Path) -> None:
    """Trainer stores the score of a trial, which is not callable, under the same name."""
    pytest.importorskip("optuna", reason="optuna is not installed (extra search)")
    used: list[int] = []

    class Counted(Classification):
        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            used.append(1)
            return super().__call__(model, batch)

    def model_init() -> Any:
        return fresh()

    class Putting(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            trainer.objective = counted

    counted: Objective = Counted()
    trainer = MethodTrainer(
        model_init=model_init,
        args=arguments(tmp_path, max_steps=2),
        method=SAM(rho=0.1),
        train_dataset=classification_data(),
        eval_dataset=classification_data(),
        callbacks=[Putting],
    )
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)},
        n_trials=1,
        backend="optuna",
        direction="minimize",
    )
    assert best.objective > 0, "the score of the trial, in spite of the objective"
    assert len(used) == 2 * 2
    assert trainer.objective is counted
