"""Mixed precision inside the Trainer: bf16 on the CPU, and loss scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate.hooks import ModelHook, add_hook_to_module
from torch._dynamo.utils import counters

from deltasam.integrations import MethodTrainer
from deltasam.methods import ERM, SAM, DeltaSAM, Method
from deltasam.objectives import Classification
from deltasam.weighting import FiniteDifference
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, largest_difference, weights

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bf16 instructions


@pytest.mark.parametrize("method", [ERM(), SAM(rho=0.0)], ids=lambda method: type(method).__name__)
def test_bf16_is_the_plain_trainers_bf16(method: Method, tmp_path: Path) -> None:
    plain, ours, full = fresh(), fresh(), fresh()
    # First: before transformers 5, a Trainer in bf16 leaves later ones in bf16, too.
    MethodTrainer(model=full, args=arguments(tmp_path), method=method, train_dataset=classification_data()).train()
    hf.Trainer(model=plain, args=arguments(tmp_path, bf16=True), train_dataset=classification_data()).train()
    trainer = MethodTrainer(
        model=ours, args=arguments(tmp_path, bf16=True), method=method, train_dataset=classification_data()
    )
    trainer.train()
    assert_same_bits(weights(ours), weights(plain))
    assert largest_difference(weights(ours), weights(full)) > 1e-5, "bf16 changed nothing"


@pytest.mark.parametrize("hooked", [False, True], ids=["bare", "hooked"])
@pytest.mark.parametrize("precision", ["float32", "ambient"])
def test_probes_run_in_the_precision_they_ask_for(precision: Any, hooked: bool, tmp_path: Path) -> None:
    seen: list[tuple[bool, torch.dtype]] = []
    model = fresh()
    if hooked:  # as with device_map="auto": forward is no longer a method of the model
        add_hook_to_module(model, ModelHook())
    model.classifier.register_forward_hook(
        lambda module, inputs, output: seen.append((torch.is_grad_enabled(), output.dtype))
    )
    trainer = MethodTrainer(
        model=model,
        args=arguments(tmp_path, bf16=True, max_steps=1),
        method=DeltaSAM(rho=0.05, weighting=FiniteDifference(precision=precision)),
        objective=Classification(),  # an inferred one would be compared with the model's loss first
        train_dataset=classification_data(),
    )
    trainer.train()
    probes = {dtype for graph, dtype in seen if not graph}
    assert probes == {torch.float32 if precision == "float32" else torch.bfloat16}
    assert {dtype for graph, dtype in seen if graph} == {torch.bfloat16}


def test_probes_of_a_compiled_model(tmp_path: Path) -> None:
    weightings, graphs = [], []

    class Counting(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            graphs.append(counters["stats"]["unique_graphs"])

    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        model = fresh(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        trainer = MethodTrainer(
            model=model,
            args=arguments(tmp_path, bf16=True, max_steps=4, logging_strategy="steps", logging_steps=1, **options),
            method=DeltaSAM(rho=0.5),
            train_dataset=classification_data(),
            callbacks=[Counting()],
        )
        trainer.train()
        weightings.append([entry["weights_mean"] for entry in trainer.state.log_history if "weights_mean" in entry])
    assert weightings[0] == pytest.approx(weightings[1], rel=1e-3)  # in bfloat16 the difference is 5%
    assert graphs[-1] == graphs[-3] > 0  # no recompilation in every step


def test_the_objective_sees_outputs_in_float32(tmp_path: Path) -> None:
    seen = []

    def objective(model: Any, batch: Any) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        seen.append(logits.dtype)
        return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")

    args = arguments(tmp_path, bf16=True, max_steps=1)
    trainer = MethodTrainer(
        model=fresh(), args=args, method=SAM(), objective=objective, train_dataset=classification_data()
    )
    trainer.train()
    assert seen == [torch.float32] * 2


def test_the_model_is_as_accelerate_made_it_after_a_step(tmp_path: Path) -> None:
    model = fresh()
    trainer = MethodTrainer(
        model=model,
        args=arguments(tmp_path, bf16=True, max_steps=2),
        method=SAM(),
        train_dataset=classification_data(),
        eval_dataset=classification_data(),
    )
    trainer.train()
    hidden = model.forward
    trainer.training_step(model, trainer.data_collator(classification_data()[:4]))
    assert model.forward is hidden
    with pytest.raises(ValueError, match=r"specify .*input_ids or inputs_embeds"):
        trainer.training_step(model, {"labels": torch.tensor([0, 1])})
    assert model.forward is hidden
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("method", [ERM(), SAM(rho=0.1)], ids=lambda method: type(method).__name__)
def test_loss_scaling_leaves_the_update_as_it_was(method: Method, tmp_path: Path) -> None:
    results = []
    for scale in (None, 2.0**10):
        model = fresh()
        trainer = MethodTrainer(
            model=model,
            args=arguments(tmp_path, max_grad_norm=0.0, gradient_accumulation_steps=2),
            method=method,
            train_dataset=classification_data(),
        )
        if scale is not None:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.train()
        results.append(weights(model))
    assert_same_bits(*results)


def test_an_overflow_skips_the_step(tmp_path: Path) -> None:
    model = fresh()
    before = weights(model)
    trainer = MethodTrainer(
        model=model,
        args=arguments(tmp_path, max_grad_norm=0.0, max_steps=1),
        method=SAM(),
        train_dataset=classification_data(),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=float("inf"))
    trainer.accelerator.scaler = scaler
    trainer.train()
    assert_same_bits(weights(model), before)
    assert trainer.method.skipped == 1
