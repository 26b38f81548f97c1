"""Trainer options: without a perturbation our Trainer must do the same as the plain one.

Plain training (``ERM``, and ``SAM(rho=0)``) is compared in all weights, log entries, and states that callbacks see.
``SAM`` only has to train. Nothing is fetched; what the installed versions do not know is skipped.
"""

from __future__ import annotations

import math
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from deltasam.methods import ERM, SAM, Method
from helpers.trainers import largest_difference
from helpers.upstream import (
    Outcome,
    Row,
    differences,
    evaluate_and_predict,
    params,
    resume,
    run,
    train_and_predict,
    train_with_reports,
)
from helpers.upstream_setups import (
    adapted,
    bert,
    columns,
    gpt2,
    hungry,
    language,
    own_head,
    prompted,
    ragged,
    scored,
    seq2seq,
    sft,
    still,
    stream,
)

pytestmark = [
    pytest.mark.upstream,
    # Warnings of the libraries about each other's versions.
    pytest.mark.filterwarnings("ignore::UserWarning:(?!deltasam)"),
]

METHODS: dict[str, Method] = {"erm": ERM(), "sam-0": SAM(rho=0.0), "sam": SAM(rho=0.05)}
SGD = {"optim": "sgd", "learning_rate": 0.1}  # Adam amplifies rounding
ROUNDING = 1e-5
LOGGED = 1e-6  # relative; models sum their losses in another order, which does not change the weights
EPOCHS = {"max_steps": -1, "num_train_epochs": 2}  # of 22 instances: the last batch has two
SAVING = {"save_strategy": "steps", "save_steps": 2}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "learning_rate": 5e-2}
COMPILED = {"torch_compile": True, "max_steps": 3}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
OTHER = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}

ROWS = [
    Row("nothing"),
    # Models.
    Row("distilbert", make=lambda: bert(kind="distilbert")),
    Row("regression", make=lambda: bert(num_labels=1), tolerance=ROUNDING, options=SGD),
    Row("gpt2", make=gpt2),
    Row("llama", make=language),
    Row("own-head", make=own_head),
    Row("lora-classifier", make=lambda: adapted(bert()), needs=["peft"]),
    Row("lora-llama", make=lambda: adapted(language()), needs=["peft"]),
    Row("prompt-tuning", make=prompted, needs=["peft"]),
    # Trainers.
    Row("seq2seq-t5", {"predict_with_generate": True, "generation_max_length": 6}, seq2seq, act=train_and_predict),
    Row("seq2seq-bart", make=lambda: seq2seq("bart")),
    Row("sft", SGD | {"bf16": False, "gradient_checkpointing": False}, sft, ROUNDING, needs=["trl"]),
    # Losses.
    Row("label-smoothing", SGD | {"label_smoothing_factor": 0.1}, bert, ROUNDING),
    Row("label-smoothing-llama", SGD | {"label_smoothing_factor": 0.1}, language, ROUNDING),
    Row("neftune", {"neftune_noise_alpha": 5.0}, language),
    Row("average-tokens", {"average_tokens_across_devices": True}, language),
    Row("no-average-tokens", {"average_tokens_across_devices": False}, language),
    # Memory and speed.
    Row("checkpointing", {"gradient_checkpointing": True}),
    Row("checkpointing-not-reentrant", OTHER),
    Row("checkpointing-reentrant", REENTRANT, methods=["erm"]),
    Row("compile-eager", SGD | COMPILED | {"torch_compile_backend": "eager"}, still, ROUNDING, methods=["erm", "sam"]),
    Row("compile", SGD | COMPILED, lambda: own_head(0.0), ROUNDING, methods=["erm", "sam"]),
    Row("bf16", {"bf16": True}),
    Row("bf16-llama", SGD | {"bf16": True}, language, 1e-2),
    Row("auto-find-batch-size", {"auto_find_batch_size": True}),
    Row("auto-find-batch-size-found", {"auto_find_batch_size": True}, hungry),
    Row("empty-cache", {"torch_empty_cache_steps": 1}),
    # Data.
    Row("group-by-length", {"group_by_length": True}, ragged),
    Row("sampling-by-length", {"train_sampling_strategy": "group_by_length"}, ragged),
    Row("sampling-sequential", {"train_sampling_strategy": "sequential"}),
    Row("padding", make=ragged),
    Row("data-seed", {"data_seed": 7, "seed": 3}),
    Row("drop-last", EPOCHS | {"dataloader_drop_last": True}, language),
    Row("workers", {"dataloader_num_workers": 1, "max_steps": 2}),
    Row("iterable", make=stream),
    Row("unused-columns", make=columns),
    Row("keep-columns", {"remove_unused_columns": False}),
    Row("label-names", {"label_names": ["labels"]}),
    # Updates.
    Row("epochs", EPOCHS, language),
    *(
        Row(f"accumulation-{k}", SGD | EPOCHS | {"gradient_accumulation_steps": k}, language, ROUNDING * (k > 1))
        for k in (1, 2, 4)
    ),
    Row("no-clipping", {"max_grad_norm": 0.0}),
    Row("clipping", {"max_grad_norm": 0.05}),
    Row("weight-decay", {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}),
    Row("warm-up", {"warmup_steps": 3}),
    Row("warm-up-ratio", {"warmup_ratio": 0.5}),
    Row("cosine", {"lr_scheduler_type": "cosine", "warmup_steps": 2}),
    Row("cosine-restarts", {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}),
    Row("plateau", EVALUATING | {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_loss"}),
    *(Row(name, {"optim": name}) for name in ("sgd", "adamw_torch", "adamw_torch_fused", "adafactor", "rmsprop")),
    Row("adamw_bnb_8bit", {"optim": "adamw_bnb_8bit"}, needs=["bitsandbytes"]),
    # Logs, evaluations and checkpoints.
    Row("logging-first-step", {"logging_first_step": True, "logging_steps": 3}),
    Row("logging-unfiltered", {"logging_nan_inf_filter": False}),
    Row("tensorboard", {"report_to": "tensorboard"}, act=train_with_reports, needs=["tensorboard"], methods=["erm"]),
    Row("tokens-seen", {"include_num_input_tokens_seen": "non_padding"}),
    Row("eval-on-start", EVALUATING | {"eval_on_start": True}),
    Row("eval-every-epoch", EPOCHS | {"eval_strategy": "epoch", "save_strategy": "epoch"}, language),
    Row("evaluation-alone", act=evaluate_and_predict, methods=["erm"]),
    Row(
        "evaluation-alone-llama", {"label_smoothing_factor": 0.1}, language, act=evaluate_and_predict, methods=["erm"]
    ),
    Row("loss-alone", EVALUATING | {"prediction_loss_only": True}),
    Row("metrics", EVALUATING, scored, act=train_and_predict),
    Row(
        "metrics-of-preprocessed-logits",
        EVALUATING,
        lambda: scored(preprocess_logits_for_metrics=lambda logits, labels: logits.round(decimals=1)),
        act=train_and_predict,
    ),
    Row("metrics-in-parts", EVALUATING | {"eval_accumulation_steps": 1, "per_device_eval_batch_size": 3}, scored),
    Row("resume", SAVING, act=resume),
    Row("resume-accumulated", SGD | SAVING | {"gradient_accumulation_steps": 2}, language, ROUNDING, act=resume),
    Row("best-model", EVALUATING | SAVING | BEST, scored),
    Row("best-model-alone", EVALUATING | BEST | {"save_strategy": "best"}, scored),
]


@cache
def plain(row: str, folder: Path) -> Outcome:
    return run(next(each for each in ROWS if each.name == row), None, folder / "plain")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("options")


@pytest.mark.parametrize(("row", "method"), params(ROWS))
def test_option(row: Row, method: str, folder: Path, tmp_path: Path) -> None:
    reason = row.skip_reason()
    if row.name == "compile" and shutil.which("c++") is None:
        reason = "no C++ compiler"
    if reason is not None:
        pytest.skip(reason)
    found = run(row, METHODS[method], tmp_path)
    if method != "sam":
        wanted = plain(row.name, folder / row.name)
        for what, tolerance in (("seen", 0.0), ("logs", LOGGED), ("result", LOGGED), ("after", 0.0)):
            pair = getattr(found, what), getattr(wanted, what)
            wrong = list(differences(*pair, max(tolerance, row.tolerance)))
            assert not wrong, what
    if row.act is not evaluate_and_predict:
        assert largest_difference(found.before, found.after) > 1e-4, "nothing was trained"
        losses = [entry["loss"] for entry in found.logs if "loss" in entry]
        assert losses
        assert all(map(math.isfinite, losses))
    torch._dynamo.reset()
