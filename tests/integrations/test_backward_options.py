"""Options of a Trainer that change the backward pass: activation checkpointing, and optimizers that step inside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers as hf

from deltasam.integrations import MethodTrainer
from deltasam.methods import ASAM, ERM, SAM, DeltaSAM, LookSAM, Method, PerInstanceSAM
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, weights


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    ends = []
    for checkpointing in (False, True):
        args = arguments(tmp_path, gradient_checkpointing=checkpointing)
        trainer = MethodTrainer(model=fresh(), args=args, method=SAM(rho=0.5), train_dataset=classification_data())
        trainer.train()
        ends.append(weights(trainer.model))
    assert args.gradient_checkpointing_kwargs == {"use_reentrant": False}  # transformers 4 defaults to True
    assert_same_bits(*ends)


def test_other_options_of_checkpointing_are_kept(tmp_path: Path) -> None:
    options = {"preserve_rng_state": True}
    args = arguments(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
    MethodTrainer(model=fresh(), args=args, method=SAM(), train_dataset=classification_data()).train()
    assert args.gradient_checkpointing_kwargs == {"use_reentrant": False, **options}


ASCENDING = [SAM(), ASAM(), LookSAM(), DeltaSAM(), PerInstanceSAM(), PerInstanceSAM(engine="loop")]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # by torch, for passes without a graph
@pytest.mark.filterwarnings("ignore:.*the loop over instances passes the whole batch")
@pytest.mark.parametrize("method", ASCENDING, ids=lambda m: f"{type(m).__name__}-{getattr(m, 'engine', '')}")
def test_reentrant_checkpointing_names_the_setting(method: Method, tmp_path: Path) -> None:
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    args = arguments(tmp_path, max_steps=1, **options)
    MethodTrainer(model=fresh(), args=args, method=ERM(), train_dataset=classification_data()).train()
    model = fresh()
    before = weights(model)
    remedy = r"{'use_reentrant': False}\)"
    places = rf"TrainingArguments\(gradient_checkpointing_kwargs={remedy}.*gradient_checkpointing_enable\(.*{remedy}"
    trainer = MethodTrainer(model=model, args=args, method=method, train_dataset=classification_data())
    with pytest.raises(RuntimeError, match=places):
        trainer.train()
    assert_same_bits(weights(model), before)


INSIDE = [each.value for each in hf.training_args.OptimizerNames if "lomo" in each.value or "layerwise" in each.value]


@pytest.mark.parametrize("name", INSIDE)
def test_optimizers_that_step_inside_backward_name_another(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"optim='{name}'") as caught:
        MethodTrainer(model=fresh(), args=arguments(tmp_path, optim=name), method=SAM())
    instead = re.findall(r"'(\w+)'", str(caught.value))[1:]
    assert instead
    for each in instead:
        assert MethodTrainer(model=fresh(), args=arguments(tmp_path, optim=each), method=SAM())
