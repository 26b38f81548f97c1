"""MethodMixin over a trainer that it does not know, with its own loss and step, by public means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from deltasam import ERM, SAM
from deltasam.integrations import MethodMixin
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, largest_difference, weights

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


class Focal(hf.Trainer):
    """Somebody's trainer: another loss, and a step that counts."""

    steps_made = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = focal(outputs.logits, labels).mean()
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.steps_made += 1
        return super().training_step(*args, **kwargs)


def losses(model: nn.Module, batch: Any) -> Tensor:
    labels = batch["labels"]
    return focal(model(**{name: value for name, value in batch.items() if name != "labels"}).logits, labels)


class FocalMethodTrainer(MethodMixin, Focal):
    replaces = (Focal,)

    def default_objective(self) -> Any:
        return losses

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.steps_made += 1
        return super().training_step(*args, **kwargs)


def trained(kind: Any, folder: Path, **options: Any) -> Any:
    trainer = kind(model=fresh(**STILL), args=arguments(folder), train_dataset=classification_data(),
                   eval_dataset=classification_data(8), **options)  # fmt: skip
    trainer.train()
    return trainer


def test_the_advice_of_the_errors_leads_to_a_class_that_works(tmp_path: Path) -> None:
    class Alone(MethodMixin, Focal):
        pass

    with pytest.raises(ValueError, match=r"Focal\.compute_loss .*objective=.*default_objective\(self\) of Alone"):
        trained(Alone, tmp_path, method=SAM())
    with pytest.raises(ValueError, match=r"Focal\.training_step .*replaces = \(Focal,\) in Alone"):
        trained(Alone, tmp_path, method=SAM(), objective=losses)

    class Told(MethodMixin, Focal):
        replaces = (Focal,)

    told = trained(Told, tmp_path, method=ERM(), objective=losses)
    plain = trained(Focal, tmp_path)
    ours = trained(FocalMethodTrainer, tmp_path, method=ERM())
    assert_same_bits(weights(told.model), weights(ours.model))
    assert largest_difference(weights(plain.model), weights(ours.model)) < 1e-6
    assert ours.steps_made == plain.steps_made == 6
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)
    moved = trained(FocalMethodTrainer, tmp_path, method=SAM(rho=0.1))
    assert largest_difference(weights(plain.model), weights(moved.model)) > 1e-5


def test_replacing_the_step_does_not_replace_the_loss(tmp_path: Path) -> None:
    class Forgotten(MethodMixin, Focal):
        replaces = (Focal,)

    with pytest.raises(ValueError, match=r"Focal\.compute_loss would not be used"):
        trained(Forgotten, tmp_path, method=SAM())
