"""What the step of the plain Trainer does besides ``backward()``, and ours must do too."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from deltasam.integrations import MethodTrainer
from deltasam.integrations._infer import check_inferred
from deltasam.integrations._logging import LossFilter, StepMetrics
from deltasam.methods import ERM, SAM, LookSAM, Step
from deltasam.objectives import Classification, Seq2Seq
from helpers.tiny import classifier, labelled
from helpers.trainers import arguments, classification_data, fresh, seq2seq_data


class Slope(nn.Module):
    """One weight, which multiplies the number of letters."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(()))

    def forward(self, texts: list[str]) -> Tensor:
        return self.slope * torch.tensor([float(len(text)) for text in texts])


@pytest.mark.parametrize("counted", [False, True], ids=["none of them", "every other one"])
def test_micro_batches_that_cannot_be_counted_weigh_the_same(counted: bool, tmp_path: Path) -> None:
    """Three batches of texts in steps of two: the last step of the epoch has one."""
    model = Slope()
    known = itertools.cycle([{"count": torch.ones(1)} if counted else {}, {}])
    args = arguments(
        tmp_path,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=-1,
        num_train_epochs=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        remove_unused_columns=False,
    )
    trainer = MethodTrainer(
        model=model,
        args=args,
        method=ERM(),
        objective=lambda model, batch: model(batch["texts"]),
        train_dataset=["a", "b", "c"],
        data_collator=lambda texts: {"texts": texts, **next(known)},
    )
    trainer.train()
    # The gradient of each step is the mean over its batches, 1; transformers 4 skips the last, smaller step.
    assert model.slope.item() == -trainer.state.global_step
    assert trainer.state.global_step == 2 or hf.__version__ < "5"


def test_all_of_the_model_is_set_to_training(tmp_path: Path) -> None:
    model = fresh().train()
    model.bert.eval()  # for example by a callback
    trainer = MethodTrainer(model=model, args=arguments(tmp_path), method=SAM())
    trainer.training_step(model, trainer.data_collator(classification_data(4)))
    assert all(module.training for module in model.modules())


def test_optimizers_with_modes_are_set_to_training(tmp_path: Path) -> None:
    class Modes(torch.optim.SGD):
        mode = "eval"

        def train(self) -> None:
            self.mode = "train"

    model = fresh()
    optimizer = Modes(model.parameters(), lr=0.1)
    trainer = MethodTrainer(model=model, args=arguments(tmp_path), method=SAM(), optimizers=(optimizer, None))
    trainer.training_step(model, trainer.data_collator(classification_data(4)))
    assert optimizer.mode == "train"


def test_inputs_are_prepared_by_the_trainer(tmp_path: Path) -> None:
    class Renaming(MethodTrainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            return {**super()._prepare_inputs(inputs), "labels": inputs["labels"] * 0}

    seen = []

    def objective(model: Any, batch: Any) -> Tensor:
        seen.append(batch["labels"])
        return Classification()(model, batch)

    model = fresh()
    trainer = Renaming(model=model, args=arguments(tmp_path), method=ERM(), objective=objective)
    trainer.training_step(model, trainer.data_collator(classification_data(4)))
    assert not seen[0].any()


def test_a_single_step_is_not_part_of_another(tmp_path: Path) -> None:
    model = fresh("t5")
    trainer = MethodTrainer(model=model, args=arguments(tmp_path), method=ERM(), objective=Seq2Seq())
    batch = trainer.data_collator(seq2seq_data(4))
    batch["labels"].fill_(-100)
    with pytest.raises(ValueError, match="target token"):
        trainer.training_step(model, batch)


def test_an_inferred_objective_is_compared_once(tmp_path: Path) -> None:
    model = fresh()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(model.training))
    trainer = MethodTrainer(model=model, args=arguments(tmp_path), method=ERM())
    for _ in range(3):
        trainer.training_step(model, trainer.data_collator(classification_data(4)))
    assert calls == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("labels", "message"),
    [(torch.tensor([0, 9]), "labels .* 9"), (torch.tensor([0.0, 1.0]), "labels .* torch.float32")],
)
def test_unsuitable_labels_raise_the_objectives_error(labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_inferred(classifier(), labelled(labels), Classification())


def test_with_smoothing_it_is_not_the_models_own(tmp_path: Path) -> None:
    """With a confident model, smoothing changes the loss by more than the comparison allows."""
    model = fresh()
    nn.init.constant_(model.classifier.bias, 0.0)
    model.classifier.bias.data[1] = 8.0
    args = arguments(tmp_path, label_smoothing_factor=0.3)
    trainer = MethodTrainer(model=model, args=args, method=ERM())
    batch = trainer.data_collator(classification_data(4))
    batch["labels"].fill_(1)
    assert float(trainer.training_step(model, batch)) > 0.5


def test_the_comparison_is_made_with_labels_of_another_name_too() -> None:
    """transformers 4.50 refuses unknown keywords; later versions ignore them and return no loss."""
    model, batch = classifier().train(), labelled(torch.tensor([0, 1]))
    batch["target"] = batch.pop("labels")
    check_inferred(model, batch, Classification(labels="target"))
    assert sorted(batch) == ["attention_mask", "input_ids", "target"]

    class Twice(Classification):
        def __call__(self, model: Any, batch: Any) -> torch.Tensor:
            return super().__call__(model, batch) * 2

    with pytest.raises(ValueError, match="computes the loss"):
        check_inferred(model, batch, Twice(labels="target"))


def test_the_comparison_leaves_the_modes_of_modules() -> None:
    model = classifier().train()
    model.bert.eval()
    check_inferred(model, labelled(torch.tensor([0, 1])), Classification())
    assert model.training
    assert not any(module.training for module in model.bert.modules())


def test_the_comparison_does_not_call_eval() -> None:
    """Which merges the adapters of loralib: the training would go on without them."""

    class Merging(torch.nn.Identity):
        merged = False

        def train(self, mode: bool = True) -> Any:
            self.merged = not mode
            return super().train(mode)

    model = classifier().train()
    model.dropout = Merging()
    check_inferred(model, labelled(torch.tensor([0, 1])), Classification())
    assert not model.dropout.merged


def test_the_comparison_has_no_side_effects_and_repeats_the_draws() -> None:
    class Always(torch.nn.BatchNorm1d):
        """Draws and counts in eval mode, too."""

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                self.running_mean += 1
            return torch.nn.functional.dropout(20 * x, 0.5)

    model = classifier().train()
    model.dropout = Always(model.config.hidden_size)
    state = torch.get_rng_state()
    check_inferred(model, labelled(torch.tensor([0, 1])), Classification())
    assert not model.dropout.running_mean.any()
    assert torch.equal(state, torch.get_rng_state())


def test_operations_are_those_of_the_model_at_hand(tmp_path: Path) -> None:
    """They are cached during one training: the next may have another model."""
    trainer = MethodTrainer(
        model=fresh(), args=arguments(tmp_path, max_steps=1), method=ERM(), train_dataset=classification_data(4)
    )
    batch = trainer.data_collator(classification_data(4))
    once = trainer.floating_point_ops(batch)
    trainer.model.extra = nn.Linear(64, 64)
    assert trainer.floating_point_ops(batch) == once
    trainer.train()
    assert trainer.floating_point_ops(batch) > once


def test_a_new_training_starts_with_empty_means(tmp_path: Path) -> None:
    args = arguments(tmp_path, logging_strategy="steps", logging_steps=1, max_steps=1)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    trainer = MethodTrainer(model=fresh(**still), args=args, method=SAM(), train_dataset=classification_data(4))
    batch = trainer.data_collator(classification_data(4))
    trainer.training_step(trainer.model, {**batch, "labels": 1 - batch["labels"]})  # from an interrupted training
    trainer.train()
    alone = trainer.state.log_history[0]["ascent_grad_norm"]
    trainer.model.load_state_dict(fresh().state_dict())
    trainer.train()
    assert trainer.state.log_history[0]["ascent_grad_norm"] == pytest.approx(alone, rel=1e-5)


def test_entries_of_an_evaluation_are_the_trainers(tmp_path: Path) -> None:
    args = arguments(
        tmp_path, logging_strategy="steps", logging_steps=2, eval_strategy="steps", eval_steps=1, max_steps=2
    )
    data = classification_data(8)
    trainer = MethodTrainer(model=fresh(), args=args, method=SAM(), train_dataset=data, eval_dataset=data)
    trainer.train()
    entries = trainer.state.log_history
    assert [("eval_loss" in entry, "sharpness" in entry) for entry in entries[:3]].count((True, False)) == 2
    assert any("sharpness" in entry for entry in entries)


def test_entries_hold_means_since_the_last_one() -> None:
    metrics = StepMetrics()
    for norm, weights in ((1.0, [1.0, 3.0]), (2.0, [2.0, 2.0])):
        losses = torch.ones(2)
        metrics.add(
            Step(
                losses=losses,
                forwards=2,
                backwards=2,
                perturbed_losses=losses + norm,
                weights=torch.tensor(weights),
                grad_norm=torch.tensor(norm),
            )
        )
    found = metrics.drain(lambda values: values * 10)  # as if reduced over processes
    assert found == {
        "sharpness": 15.0,
        "ascent_grad_norm": 15.0,
        "weights_mean": 20.0,
        "weights_std": 5.0,
        "weights_max": 25.0,
    }
    assert metrics.drain(lambda values: values) == {}


def test_the_last_finite_loss_gets_the_share_of_the_micro_batch(tmp_path: Path) -> None:
    model = fresh()

    def objective(model: Any, batch: Any) -> Tensor:
        zeros = 0.0 * model(input_ids=batch["input_ids"]).logits.sum(1)
        return zeros + (3.0 if len(zeros) == 4 else float("nan"))

    trainer = MethodTrainer(model=model, args=arguments(tmp_path), method=ERM(), objective=objective)
    with trainer._loss_filter.enabled_for(trainer.args):
        found = [float(trainer.training_step(model, trainer.data_collator(classification_data(n)), 6)) for n in (4, 2)]
    assert found == pytest.approx([3.0 * 4 / 6, 3.0 * 2 / 6])


def test_losses_are_filtered_in_a_training_only() -> None:
    losses, args = LossFilter(), SimpleNamespace(logging_nan_inf_filter=True)
    with losses.enabled_for(args):
        losses.filtered(torch.tensor(2.0))
    assert losses.filtered(torch.tensor(float("nan"))).isnan()


def test_a_callback_changes_the_method_of_split_steps(tmp_path: Path) -> None:
    class Off(hf.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.method = trainer.method.replace(rho=0.0 if state.global_step else 0.05)

    trainer = MethodTrainer(
        model=fresh(),
        args=arguments(tmp_path, max_steps=3),
        method=SAM(),
        train_dataset=classification_data(),
        callbacks=[Off()],
        on_out_of_memory="split",
    )
    trainer.train()
    assert trainer.forwards == 2 + 1 + 1


def test_another_method_of_the_same_settings_is_recorded_again(tmp_path: Path) -> None:
    trainer = MethodTrainer(model=fresh(), args=arguments(tmp_path), method=LookSAM(), capture=True)
    batch, before = trainer.data_collator(classification_data(4)), trainer.captured
    trainer.training_step(trainer.model, batch)
    assert trainer.captured is before
    trainer.method = LookSAM()
    trainer.training_step(trainer.model, batch)
    assert trainer.captured is not before
    assert trainer.captured is not None
    assert trainer.captured.method is trainer.method


def test_every_training_records_its_own_steps(tmp_path: Path) -> None:
    """The recordings use the tensors of the old state."""
    trainer = MethodTrainer(
        model=fresh(),
        args=arguments(tmp_path, max_steps=1),
        method=LookSAM(),
        capture=True,
        train_dataset=classification_data(4),
    )
    before = trainer.captured
    trainer.train()
    assert trainer.captured is not before


def test_wrong_objectives_raise_in_the_constructor(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="objective="):
        MethodTrainer(model=fresh(), args=arguments(tmp_path), method=SAM(), objective=3)
