"""The objective is inferred from the head, and its mean is the loss of the plain Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from deltasam.integrations import MethodTrainer
from deltasam.integrations._infer import infer_objective
from deltasam.methods import ERM
from deltasam.objectives import CausalLM, Classification, Regression, Seq2Seq, Tokens
from helpers.tiny import causal, classifier, encoder, encoder_config, sentences, seq2seq, target_tokens
from helpers.trainers import arguments


class OwnHead(hf.BertForSequenceClassification):
    """A user's subclass of a known head."""


def cases() -> dict[str, tuple[Any, type, Tensor]]:
    """Model, the kind of objective, and labels for a batch of four."""
    classes, tokens = torch.tensor([0, 1, 2, 1]), target_tokens(4, 7)
    several = torch.tensor([[0.0, 1.0, 1.0]] * 4)
    return {
        "classes": (classifier(num_labels=3), Classification, classes),
        "roberta": (classifier("roberta", num_labels=3), Classification, classes),
        "subclass": (OwnHead(encoder_config("bert", num_labels=3)).eval(), Classification, classes),
        "regression": (classifier(num_labels=1), Regression, torch.tensor([0.5, 1.0, 2.0, 0.0])),
        "regression of several": (classifier(num_labels=3, problem_type="regression"), Regression, several),
        "yes or no": (classifier(num_labels=3, problem_type="multi_label_classification"), Classification, several),
        "t5": (seq2seq("t5"), Seq2Seq, target_tokens()),
        "bart": (seq2seq("bart"), Seq2Seq, target_tokens()),
        "gpt2": (causal("gpt2"), CausalLM, tokens),
        "llama": (causal("llama"), CausalLM, tokens),
        "token classes": (
            hf.BertForTokenClassification(encoder_config("bert", num_labels=41)).eval(), Tokens, target_tokens(4, 7),
        ),
        "masked words": (hf.BertForMaskedLM(encoder_config("bert")).eval(), Tokens, target_tokens(4, 7)),
    }  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", list(cases()))
def test_the_mean_is_the_plain_trainers_loss(name: str, smoothing: float, tmp_path: Path) -> None:
    model, kind, labels = cases()[name]
    if smoothing and kind is Regression:
        with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1"):
            infer_objective(model, label_smoothing=smoothing)
        return
    objective = infer_objective(model, label_smoothing=smoothing)
    assert type(objective) is kind
    batch = {**sentences(4), "labels": labels}
    if smoothing and name == "yes or no":
        smoothing = 0.0  # Trainer warns and disables it
    if kind is Seq2Seq:  # with smoothing, the plain Trainer expects this from the collator
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
    trainer = hf.Trainer(model=model, args=arguments(tmp_path, label_smoothing_factor=smoothing))
    expected = trainer.compute_loss(model, dict(batch))
    torch.testing.assert_close(objective(model, batch).mean(), expected, atol=1e-6, rtol=1e-6)


def test_peft_models_are_unwrapped() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (extra peft)")
    model = peft.get_peft_model(
        classifier(num_labels=3), peft.LoraConfig(target_modules=["query"], task_type="SEQ_CLS")
    )
    assert infer_objective(model) == Classification()


@pytest.mark.parametrize("factor", [0.01, 0.0])
def test_the_regulariser_of_adalora(factor: float, tmp_path: Path) -> None:
    """Only the model adds it to its loss; compared on the first batch, a small one would pass as rounding."""
    peft = pytest.importorskip("peft", reason="peft is not installed (extra peft)")
    options = {"target_modules": ["query"], "task_type": "SEQ_CLS", "total_step": 9}
    model = peft.get_peft_model(classifier(num_labels=3), peft.AdaLoraConfig(orth_reg_weight=factor, **options))
    assert infer_objective(model, label_smoothing=0.1) == Classification(label_smoothing=0.1)
    if not factor:
        assert infer_objective(model) == Classification()
        return
    data = [{**{k: v[0] for k, v in sentences(1).items()}, "labels": torch.tensor(1)}] * 8
    trainer = MethodTrainer(model=model, args=arguments(tmp_path), method=ERM(), train_dataset=data)
    with pytest.raises(ValueError, match=r"AdaLoRA adds 0\.01 times.*orth_reg_weight=0.*objective"):
        trainer.train()


def test_several_labels_raise(tmp_path: Path) -> None:
    args = arguments(tmp_path, label_names=["labels", "more"])
    trainer = MethodTrainer(model=classifier(), args=args, method=ERM())
    with pytest.raises(ValueError, match=r"\['labels', 'more'\]; pass the objective"):
        trainer.train()


def test_labels_of_another_name(tmp_path: Path) -> None:
    trainer = MethodTrainer(model=classifier(), args=arguments(tmp_path, label_names=["truth"]), method=ERM())
    assert trainer.objective == Classification(labels="truth")


@pytest.mark.parametrize("name", list(cases()))
def test_every_head_has_labels_of_another_name(name: str) -> None:
    assert infer_objective(cases()[name][0], label_names=["truth"]).labels == "truth"  # type: ignore[attr-defined]


def test_choices_are_smoothed_too() -> None:
    model = hf.BertForMultipleChoice(encoder_config("bert"))
    assert infer_objective(model, label_smoothing=0.1) == Classification(label_smoothing=0.1)


def test_a_model_whose_forward_takes_any_keyword(tmp_path: Path) -> None:
    class Mine(hf.BertForSequenceClassification):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    trainer = MethodTrainer(model=Mine(encoder_config("bert")), args=arguments(tmp_path), method=ERM())
    assert trainer.label_names == []
    assert trainer.objective == Classification()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (encoder, "BertModel .* pass the objective"),
        (lambda: nn.Linear(2, 2), "Linear .* pass the objective"),
        (
            lambda: hf.BertForQuestionAnswering(encoder_config("bert")),
            "BertForQuestionAnswering .*objective",
        ),
    ],
    ids=["encoder", "module", "question answering"],
)
def test_an_unknown_head_raises_in_training_only(model: Any, message: str, tmp_path: Path) -> None:
    trainer = MethodTrainer(model=model(), args=arguments(tmp_path), method=ERM())
    assert trainer.objective is None
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            trainer.train()
    with pytest.raises(ValueError, match=message):
        trainer.training_step(trainer.model, {})


def answers(n: int = 8) -> list[dict[str, Tensor]]:
    batch = {**sentences(n), "start_positions": torch.arange(n) % 3, "end_positions": torch.arange(n) % 2 + 3}
    return [{name: value[i] for name, value in batch.items()} for i in range(n)]


def test_evaluation_and_prediction_need_no_objective(tmp_path: Path) -> None:
    def question_answering() -> Any:
        torch.manual_seed(1)
        return hf.BertForQuestionAnswering(encoder_config("bert")).eval()

    args = arguments(tmp_path)
    plain = hf.Trainer(model=question_answering(), args=args, eval_dataset=answers())
    ours = MethodTrainer(model=question_answering(), args=args, eval_dataset=answers(), method=ERM())
    assert ours.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    for mine, theirs in zip(ours.predict(answers()).predictions, plain.predict(answers()).predictions, strict=True):
        assert (mine == theirs).all()


def test_an_objective_may_come_later(tmp_path: Path) -> None:
    model = hf.BertForQuestionAnswering(encoder_config("bert"))
    args = arguments(tmp_path, max_steps=1)
    trainer = MethodTrainer(model=model, args=args, method=ERM(), train_dataset=answers())
    trainer.objective = lambda model, batch: model(**batch).start_logits.square().mean(1)
    assert trainer.train().global_step == 1


def test_wrong_labels_for_the_head_raise(tmp_path: Path) -> None:
    data = [{**{k: v[0] for k, v in sentences(1).items()}, "labels": torch.tensor([0.0, 1.0, 1.0])}] * 8
    trainer = MethodTrainer(model=classifier(num_labels=3), args=arguments(tmp_path), method=ERM(), train_dataset=data)
    with pytest.raises(ValueError, match="multi_label=True"):
        trainer.train()
