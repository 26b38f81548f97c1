"""A loss that would be ignored raises an error: that of a user's Trainer, and that of an unusual model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from deltasam import integrations
from deltasam.integrations import MethodMixin, MethodTrainer
from deltasam.integrations._arguments import refuse_unsupported
from deltasam.methods import ERM, SAM
from deltasam.objectives import Classification, Tokens
from deltasam.objectives.regularisers import RDrop
from helpers.tiny import causal, classifier, sentences
from helpers.trainers import Bag, arguments, classification_data, fresh


class Weighted(hf.Trainer):
    """A typical override: weighted classes."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = 10 * torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class WithWeights(MethodMixin, Weighted):
    """Behind the mixin."""


class AndItsOwn(MethodTrainer):
    """Before the mixin."""

    compute_loss = Weighted.compute_loss


class Stepping(hf.Trainer):
    """A step that is never called."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


class NeverStepping(MethodMixin, Stepping):
    """Behind the mixin."""


@pytest.mark.parametrize("kind", [WithWeights, AndItsOwn])
def test_an_overridden_compute_loss_needs_an_objective(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.compute_loss .*objective="):
        kind(model=classifier(), args=arguments(tmp_path), method=ERM())
    kind(model=classifier(), args=arguments(tmp_path), method=ERM(), objective=Classification())


def test_compute_loss_func_beside_an_objective_is_for_the_evaluation(tmp_path: Path) -> None:
    data = classification_data(4)
    trainer = MethodTrainer(
        model=fresh(),
        args=arguments(tmp_path, logging_strategy="steps", logging_steps=1),
        train_dataset=data,
        eval_dataset=data,
        method=ERM(),
        objective=Classification(),
        compute_loss_func=lambda outputs, labels, **_: torch.nn.functional.cross_entropy(outputs.logits, labels) + 10,
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] < 5
    assert trainer.evaluate()["eval_loss"] > 5


def test_smoothing_in_the_evaluation_alone(tmp_path: Path) -> None:
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    options = {"args": args, "method": ERM()}
    for objective in (Classification(), RDrop(Classification()), Classification(label_smoothing=0.2)):
        with pytest.raises(ValueError, match=r"label_smoothing_factor=0.1 .*Classification\(label_smoothing=0.1\)"):
            MethodTrainer(model=classifier(), objective=objective, **options)
    MethodTrainer(model=classifier(), objective=RDrop(Classification(label_smoothing=0.1)), **options)
    MethodTrainer(model=classifier(), objective=lambda model, batch: torch.ones(2), **options)  # not checked


def test_a_training_step_that_is_never_called(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Stepping\.training_step"):
        NeverStepping(model=classifier(), args=arguments(tmp_path), method=ERM(), objective=Classification())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"args": SimpleNamespace(n_gpu=2, optim="sgd")}, r"nn.DataParallel.* 2 GPUs.*torchrun"),
        ({"is_deepspeed_enabled": True}, r"DeepSpeed.*use DDP or FSDP"),
        (
            {"args": SimpleNamespace(n_gpu=1, optim="galore_adamw_layerwise")},
            r"optim='galore_adamw_layerwise'.*optim='galore_adamw',",
        ),
        ({"optimizer": SAM(rho=0.1)}, r"optimizers=SAM\(.*rho=0.1\).*method="),
    ],
    ids=["data parallel", "deepspeed", "layerwise", "method as optimizer"],
)
def test_unsupported_settings(changes: dict[str, Any], message: str) -> None:
    usual = {"args": SimpleNamespace(n_gpu=1, optim="sgd"), "compute_loss_func": None}
    usual |= {"accelerator": SimpleNamespace(), "optimizer": None}
    refuse_unsupported(SimpleNamespace(**usual))
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(SimpleNamespace(**(usual | changes)))


def tokens() -> list[dict[str, Any]]:
    return [{"input_ids": ids, "labels": ids.clone()} for ids in torch.randint(3, 40, (8, 7))]


def train(model: Any, folder: Path, data: Any, **options: Any) -> Any:
    trainer = MethodTrainer(
        model=model, args=arguments(folder, max_steps=1), method=SAM(rho=0.01), train_dataset=data, **options
    )
    return trainer.train()


def test_a_decoder_that_does_not_shift_its_labels(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    config = hf.BartConfig(vocab_size=64, is_decoder=True, is_encoder_decoder=False, **sizes)
    with pytest.raises(ValueError, match=r"BartForCausalLM computes the loss .* CausalLM.* pass the objective"):
        train(hf.BartForCausalLM(config), tmp_path, tokens())
    train(hf.BartForCausalLM(config), tmp_path, tokens(), objective=Tokens())


def test_a_model_that_adds_a_term(tmp_path: Path) -> None:
    class Adding(hf.BertForSequenceClassification):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
            found = super().forward(input_ids, attention_mask, labels=labels)
            if found.loss is not None:
                found.loss = found.loss + 1
            return found

    model = Adding(classifier().config)
    rows = sentences(4)
    data = [{**{name: value[i] for name, value in rows.items()}, "labels": i % 2} for i in range(4)]
    with pytest.raises(ValueError, match="Adding computes the loss"):
        train(model, tmp_path, data)
    assert model.training, "left as it was"


def test_a_usual_head_passes(tmp_path: Path) -> None:
    assert train(causal("gpt2"), tmp_path, tokens()).global_step == 1


class Pair(Bag):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = super().forward(input_ids)
        return logits, 2 * logits


class NoLoss(Bag):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return {"loss": None, "logits": super().forward(input_ids)}


@pytest.mark.parametrize("kind", [Bag, Pair, NoLoss])
def test_a_model_without_a_loss_cannot_be_evaluated_by_one(kind: type[Bag], tmp_path: Path) -> None:
    options = {"args": arguments(tmp_path), "method": SAM(), "objective": Classification()}
    data = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in classification_data()]
    trainer = MethodTrainer(model=kind(), train_dataset=data, eval_dataset=data, **options)
    trainer.train()
    with pytest.raises(ValueError, match=rf"{kind.__name__} .*\{{\"loss\": ..., \"logits\": ...\}}"):
        trainer.evaluate()
    if kind is Bag:
        assert len(trainer.predict([{"input_ids": row["input_ids"]} for row in data]).predictions) == len(data)


@pytest.mark.parametrize(
    "name",
    ["MethodTrainer", "Seq2SeqMethodTrainer", "SFTMethodTrainer", "SentenceTransformerMethodTrainer"],
)
def test_a_trainer_without_a_method_is_named(name: str, tmp_path: Path) -> None:
    try:
        kind = getattr(integrations, name)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    # The third argument is the collator, so this passes no method.
    for given in ((classifier(), arguments(tmp_path)), (classifier(), arguments(tmp_path), SAM())):
        with pytest.raises(TypeError, match=rf"{name}\(\.\.\., method="):
            kind(*given)
