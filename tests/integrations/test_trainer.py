"""A method in Hugging Face's Trainer: the gradients are the method's, all else is the Trainer's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from deltasam.integrations import MethodOptimizer, MethodTrainer, Seq2SeqMethodTrainer
from deltasam.methods import ERM, SAM, DeltaSAM, LookSAM, Method
from deltasam.objectives import Classification, Contrastive
from deltasam.speed.capture import Captured
from deltasam.speed.splitting import Splitting
from deltasam.step.radius import Scheduled
from helpers.tiny import encoder, sentences
from helpers.trainers import (
    arguments,
    assert_same_bits,
    classification_data,
    fresh,
    largest_difference,
    seq2seq_data,
    weights,
)


def trained(folder: Path, method: Method | None, *, kind: str = "bert", model: Any = None, **options: Any) -> Any:
    """Returns the weights after a short run; without a method, of the plain Trainer."""
    model = fresh(kind) if model is None else model
    data = seq2seq_data() if kind in ("t5", "bart") else classification_data()
    args = arguments(folder, **options)
    if method is None:
        trainer = hf.Trainer(model=model, args=args, train_dataset=data)
    else:
        trainer = MethodTrainer(model=model, args=args, method=method, train_dataset=data)
    trainer.train()
    return weights(model)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("bert", SAM(rho=0.0)),
        ("bert", DeltaSAM(rho=0.0)),
        ("t5", SAM(rho=0.0)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_without_a_perturbation_it_is_the_plain_trainer_bit_for_bit(kind: str, method: Method, tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", None, kind=kind)
    assert largest_difference(plain, weights(fresh(kind))) > 1e-2, "nothing was trained"
    assert_same_bits(trained(tmp_path / "method", method, kind=kind), plain)


def test_dropout_is_on_in_these_tests(tmp_path: Path) -> None:
    off = fresh(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    assert largest_difference(trained(tmp_path / "a", ERM(), model=off), trained(tmp_path / "b", ERM())) > 1e-4


def test_sam_is_the_loop_by_hand(tmp_path: Path) -> None:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    options: dict[str, Any] = {
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    seen: list[dict[str, torch.Tensor]] = []

    class Recorder(MethodTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
            seen.append(dict(inputs))
            return super().training_step(model, inputs, *args)

    model = fresh(**off)
    Recorder(
        model=model, args=arguments(tmp_path, **options), method=SAM(rho=0.1), train_dataset=classification_data()
    ).train()

    by_hand = fresh(**off).train()
    params = list(by_hand.parameters())
    for batch in seen:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        grads = torch.autograd.grad(cross_entropy(by_hand(**inputs).logits, batch["labels"]), params)
        norm = torch.sqrt(sum((g**2).sum() for g in grads))
        start = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p += 0.1 * g / norm
        grads = torch.autograd.grad(cross_entropy(by_hand(**inputs).logits, batch["labels"]), params)
        with torch.no_grad():
            for p, w, g in zip(params, start, grads, strict=True):
                p.copy_(w - 0.1 * g)
    assert len(seen) == 6
    assert largest_difference(weights(model), weights(by_hand)) < 1e-6
    assert largest_difference(weights(model), trained(tmp_path / "erm", ERM(), model=fresh(**off), **options)) > 1e-4


@pytest.mark.parametrize("kind", ["bert", "distilbert", "t5", "bart"])
def test_accumulation_is_the_large_batch(kind: str, tmp_path: Path) -> None:
    """Also for heads that ignore num_items_in_batch (transformers#47688), and with different numbers of tokens."""
    gradients = {}
    for size, steps in ((8, 1), (4, 2), (2, 4)):
        model = fresh(kind).double()
        options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1, "warmup_steps": 0}
        data = seq2seq_data() if kind in ("t5", "bart") else classification_data()
        trainer = MethodTrainer(
            model=without_dropout(model),
            args=arguments(
                tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=steps, data_seed=7, **options
            ),
            method=ERM(),
            train_dataset=data,
        )
        before = weights(model)
        trainer.train()
        gradients[size] = {name: before[name] - value for name, value in weights(model).items()}
    assert largest_difference(gradients[8], {n: torch.zeros_like(g) for n, g in gradients[8].items()}) > 1e-2
    assert largest_difference(gradients[8], gradients[4]) < 1e-10
    assert largest_difference(gradients[8], gradients[2]) < 1e-10


def test_the_last_micro_batch_of_an_epoch_weighs_what_it_holds(tmp_path: Path) -> None:
    data, results = classification_data(11), []
    for size, steps in ((11, 1), (4, 3)):
        model = without_dropout(fresh().double())
        args = arguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=steps, optim="sgd", max_steps=1
        )
        MethodTrainer(model=model, args=args, method=ERM(), train_dataset=data).train()
        results.append(weights(model))
    assert largest_difference(*results) < 1e-12


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "dropout_prob", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def test_the_steps_are_logged_with_the_trainers_entries(tmp_path: Path) -> None:
    args = arguments(tmp_path, logging_strategy="steps", logging_steps=2)
    trainer = MethodTrainer(model=fresh(), args=args, method=DeltaSAM(rho=0.05), train_dataset=classification_data())
    output = trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 3
    for entry in entries:
        assert entry["sharpness"] > 0
        assert entry["ascent_grad_norm"] > 0
        assert entry["weights_max"] >= entry["weights_mean"] > 0
        assert entry["weights_std"] >= 0
        assert entry["skipped"] == 0
        assert entry["grad_norm"] > 0
    assert (output.metrics["train_forwards"], output.metrics["train_backwards"]) == (24, 12)


def test_reports_hold_the_steps(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    args = arguments(tmp_path, logging_strategy="steps", logging_steps=2, report_to="tensorboard")
    MethodTrainer(model=fresh(), args=args, method=DeltaSAM(), train_dataset=classification_data()).train()
    file = next(tmp_path.rglob("events.out.tfevents.*"))
    events = reader.EventAccumulator(str(file)).Reload()
    assert {"train/loss", "train/sharpness", "train/ascent_grad_norm", "train/weights_max"} <= set(
        events.Tags()["scalars"]
    )
    assert len(events.Scalars("train/sharpness")) == 3


def test_logging_reads_the_device_once_per_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or original(self))
    model = fresh()
    trainer = MethodTrainer(model=model, args=arguments(tmp_path), method=SAM(), train_dataset=classification_data())
    batch = trainer.data_collator(classification_data()[:4])
    for _ in range(3):
        trainer.training_step(model, batch)
    assert not reads
    trainer.log({"loss": 0.0})
    assert len(reads) == 1


def test_evaluation_best_checkpoint_and_callbacks(tmp_path: Path) -> None:
    class Seen(hf.TrainerCallback):
        events: tuple[str, ...] = ()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.events += ("step",)

        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            self.events += ("evaluate",)

    callback = Seen()
    model = fresh()
    trainer = MethodTrainer(
        model=model,
        args=arguments(
            tmp_path,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            learning_rate=5e-2,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            max_steps=12,
        ),
        method=SAM(rho=0.05),
        train_dataset=classification_data(),
        eval_dataset=classification_data(32, seed=5),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        callbacks=[callback],
    )
    trainer.train()
    assert callback.events.count("step") == 12
    assert callback.events.count("evaluate") == 6
    scores = {entry["step"]: entry["eval_accuracy"] for entry in trainer.state.log_history if "eval_accuracy" in entry}
    assert trainer.state.best_metric == max(scores.values())
    best = hf.BertForSequenceClassification.from_pretrained(trainer.state.best_model_checkpoint)
    assert_same_bits(weights(model), weights(best))
    assert all("eval_loss" in entry for entry in trainer.state.log_history if "eval_accuracy" in entry)


def test_sequences_are_generated_in_evaluation(tmp_path: Path) -> None:
    args = arguments(
        tmp_path, kind=hf.Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=8, max_steps=2
    )
    trainer = Seq2SeqMethodTrainer(
        model=fresh("t5"), args=args, method=DeltaSAM(), train_dataset=seq2seq_data(), eval_dataset=seq2seq_data(4)
    )
    trainer.train()
    assert trainer.predict(seq2seq_data(4)).predictions.shape[0] == 4


def test_train_resets_the_state(tmp_path: Path) -> None:
    def model_init() -> Any:  # Trainer needs a function without arguments
        return fresh()

    method = LookSAM(k=3)
    trainer = MethodTrainer(
        model_init=model_init,
        args=arguments(tmp_path, max_steps=4),
        method=method,
        train_dataset=classification_data(),
    )
    trainer.train()
    first = weights(trainer.model)
    assert method.steps == 4
    trainer.train()
    assert method.steps == 4
    assert_same_bits(weights(trainer.model), first)


def test_a_callback_schedules_the_radius(tmp_path: Path) -> None:
    class WarmUp(hf.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.method = trainer.method.replace(rho=0.05 if state.global_step >= 3 else 0.0)

    trainer = MethodTrainer(
        model=fresh(),
        args=arguments(tmp_path, logging_strategy="steps", logging_steps=1),
        method=SAM(),
        train_dataset=classification_data(),
        callbacks=[WarmUp()],
    )
    trainer.train()
    assert ["sharpness" in entry for entry in trainer.state.log_history[:6]] == [False] * 3 + [True] * 3
    assert trainer.forwards == 3 + 2 * 3


def test_the_users_objective(tmp_path: Path) -> None:
    def objective(model: Any, batch: Any) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return cross_entropy(logits, batch["labels"], reduction="none")

    results = []
    for given in (objective, Classification()):
        model = fresh()
        MethodTrainer(
            model=model, args=arguments(tmp_path), method=SAM(), objective=given, train_dataset=classification_data()
        ).train()
        results.append(weights(model))
    assert_same_bits(*results)


def test_an_encoder_learns_from_pairs(tmp_path: Path) -> None:
    """Without head and labels, the objective defines how the model uses the batch."""
    views = sentences(16, seed=3)
    data = [{key: value[i] for key, value in views.items()} for i in range(16)]
    model = encoder()

    def collate(rows: list[Any]) -> dict[str, Any]:
        view = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        return {"first": view, "second": dict(view)}

    before = weights(model)
    args = arguments(tmp_path, remove_unused_columns=False, logging_strategy="steps", logging_steps=1)
    trainer = MethodTrainer(
        model=model, args=args, method=SAM(), objective=Contrastive(), train_dataset=data, data_collator=collate
    )
    trainer.train()
    assert largest_difference(weights(model), before) > 1e-3
    assert trainer.state.log_history[0]["sharpness"] > 0


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    with pytest.raises(TypeError, match=r"method=.*SAM"):
        MethodTrainer(model=fresh(), args=args, method=SAM)
    with pytest.raises(ValueError, match=r"compute_loss_func .* pass objective="):
        MethodTrainer(model=fresh(), args=args, method=SAM(), compute_loss_func=lambda *a, **k: None)
    in_place = (fresh(), args, None, None, None, None, None, lambda *a, **k: None)  # in Trainer's order
    with pytest.raises(ValueError, match=r"compute_loss_func .* pass objective="):
        MethodTrainer(*in_place, method=SAM())
    optimizer = torch.optim.SGD(fresh().parameters())
    with pytest.raises(TypeError, match=r"method=SGD \( Parameter"):
        MethodTrainer(model=fresh(), args=args, method=optimizer)
    with pytest.raises(TypeError, match=r"objective=Classification .*Classification\(\)"):
        MethodTrainer(model=fresh(), args=args, method=SAM(), objective=Classification)
    for wrapper in (Splitting, Captured):
        with pytest.raises(TypeError, match=rf"method=.*{wrapper.__name__}.*capture=True"):
            MethodTrainer(model=fresh(), args=args, method=wrapper(SAM()))
    model = fresh()
    twice = MethodOptimizer(torch.optim.SGD(model.parameters()), SAM(), model)
    with pytest.raises(ValueError, match=r"optimizers=MethodOptimizer\(.*method="):
        MethodTrainer(model=model, args=args, method=SAM(), optimizers=(twice, None))


@pytest.mark.parametrize("sizes", [{"cp": 2, "sp": 1}, {"cp": 1, "sp": 2}, {"cp": 2}])  # accelerate 1.10 has no sp
def test_context_and_sequence_parallelism_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    config = SimpleNamespace(sp_backend=None)
    for kind, size in sizes.items():
        vars(config).update({f"{kind}_size": size, f"{kind}_enabled": size > 1})

    class Divided(MethodTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            monkeypatch.setattr(Accelerator, "parallelism_config", config, raising=False)

    with pytest.raises(ValueError, match=r"parallelism_config\([cs]p_size=2\).* DDP or FSDP"):
        Divided(model=fresh(), args=arguments(tmp_path), method=SAM())


def test_a_step_without_any_target_weighs_nothing(tmp_path: Path) -> None:
    trainer = MethodTrainer(model=fresh("t5"), args=arguments(tmp_path), method=ERM())
    batch = {"labels": torch.full((2, 3), -100)}
    assert float(trainer._share(batch, trainer._count(batch))) == 0.0


@pytest.mark.parametrize(
    ("rule", "factors"),
    [
        (Scheduled(0.05, start=0.5), [0, 0, 0, 1, 1, 1]),
        (Scheduled(0.05, after="lr"), [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),  # Trainer's linear decay
    ],
    ids=["start", "lr"],
)
def test_a_scheduled_radius_follows_the_training(rule: Scheduled, factors: list[float], tmp_path: Path) -> None:
    args = arguments(tmp_path, logging_strategy="steps", logging_steps=1)
    trainer = MethodTrainer(model=fresh(), args=args, method=SAM(rho=rule), train_dataset=classification_data())
    trainer.train()
    logged = {entry["step"]: entry["radius"] for entry in trainer.state.log_history if "radius" in entry}
    expected = {step: 0.05 * factor for step, factor in enumerate(factors, start=1) if factor}
    assert logged == pytest.approx(expected, rel=1e-5)
    assert trainer.forwards == trainer.backwards == 6 + len(expected)  # plain steps have one pass
