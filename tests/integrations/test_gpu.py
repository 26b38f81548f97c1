"""The Trainer with a method on a GPU: fp16 with its scaler, bf16, clipping, and no waiting for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from deltasam.integrations import MethodTrainer
from deltasam.lab.experiments import RunConfig, run
from deltasam.lab.experiments._guard import Guard
from deltasam.methods import ERM, SAM, DeltaSAM, LookSAM, Method
from deltasam.objectives import Classification
from helpers.fault_runs import config
from helpers.trainers import Bag, arguments, assert_same_bits, classification_data, fresh, largest_difference, weights

pytestmark = pytest.mark.gpu


OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def trained(folder: Path, method: Method | None, model: Any, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    args = arguments(folder, use_cpu=False, **options)
    kind, extra = (hf.Trainer, {}) if method is None else (MethodTrainer, {"method": method})
    trainer = kind(model=model, args=args, train_dataset=classification_data(), **extra)
    trainer.train()
    return trainer, weights(model)


@pytest.mark.parametrize("options", [{}, {"fp16": True}, {"bf16": True}], ids=["float32", "fp16", "bf16"])
def test_without_a_perturbation_it_is_the_plain_trainer(
    options: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        models = [fresh(attn_implementation="eager") for _ in range(3)]  # with dropout
        ours, same, plain = (
            trained(tmp_path, method, model, **options)[1]
            for method, model in zip((SAM(rho=0.0), ERM(), None), models, strict=True)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(ours, same)
    if options:  # the model computes its loss in half precision, the objective in float32
        assert largest_difference(ours, plain) < 0.1 * largest_difference(plain, weights(fresh().cuda()))
    else:
        assert_same_bits(ours, plain)


@pytest.mark.parametrize(
    "method", [SAM(rho=0.05), DeltaSAM(rho=0.05), LookSAM(rho=0.05, k=2)], ids=lambda method: type(method).__name__
)
@pytest.mark.parametrize("options", [{"fp16": True}, {"bf16": True}], ids=["fp16", "bf16"])
def test_half_precision_is_near_float32(method: Method, options: dict[str, bool], tmp_path: Path) -> None:
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 4, "gradient_accumulation_steps": 2}
    trainer, half = trained(tmp_path, method, fresh(**OFF), **options, **settings)
    full = trained(tmp_path, method, fresh(**OFF), **settings)[1]
    moved = largest_difference(full, weights(fresh(**OFF).cuda()))
    assert largest_difference(half, full) < 0.1 * moved
    assert trainer.method.skipped == 0
    if "fp16" in options:
        assert trainer.accelerator.scaler.get_scale() > 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("method", [ERM(), SAM(), DeltaSAM(), LookSAM(k=2)], ids=lambda method: type(method).__name__)
def test_a_step_does_not_wait_for_the_device(method: Method, tmp_path: Path) -> None:
    objective = Classification(predict=lambda model, batch: model(batch["input_ids"]))
    trainer = MethodTrainer(
        model=Bag(),
        args=arguments(tmp_path, use_cpu=False, bf16=True, max_steps=2),
        method=method,
        objective=objective,
        train_dataset=classification_data(),
    )
    trainer.train()
    batch = trainer._prepare_inputs(trainer.data_collator(classification_data()[:4]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            trainer.training_step(trainer.model, dict(batch), 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Strict(hf.TrainerCallback):
    """Makes synchronization an error from update 5 until the log entry."""

    def __init__(self) -> None:
        self.updates = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:  # the first two batches of a shape are not replayed
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.updates += torch.cuda.get_sync_debug_mode() == 2
        if control.should_log:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("capture", [False, True], ids=["ordinary", "captured"])
def test_no_update_waits_for_the_device_until_it_logs(capture: bool, tmp_path: Path) -> None:
    options = {"logging_strategy": "steps", "logging_steps": 12, "max_steps": 12, "optim": "adamw_torch_fused"}
    strict = Strict()
    trainer = MethodTrainer(
        model=Bag(),
        args=arguments(tmp_path, use_cpu=False, bf16=True, **options),
        method=SAM(),
        objective=Classification(predict=lambda model, batch: model(batch["input_ids"])),
        capture=capture,
        train_dataset=classification_data(64),
        callbacks=[strict, Guard(lambda: None)],  # the order matters: the guard reads when a log entry is due
    )
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert strict.updates == 8
    if trainer.captured is not None:
        assert trainer.captured.report.replayed >= strict.updates


class EnoughError(Exception):
    """Stops a long run early."""


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_update_of_a_captured_run_waits_for_the_device(tmp_path: Path) -> None:
    plain = config(tmp_path).to_plain() | {"method": "SAM", "capture": True, "checkpoint_every": "never"}
    seen = []

    # A run of 1000 updates logs every tenth; an epoch has six updates, with batches of one shape.
    def watch(update: int, total: int, latest: dict[str, float]) -> None:
        if update == 43:
            torch.cuda.set_sync_debug_mode("error")
        if update > 43:
            seen.append(update)
        if update == 47:
            raise EnoughError

    try:
        with pytest.raises(EnoughError):
            run(RunConfig.from_plain(plain | {"schedule": {"steps": 1000}}), tmp_path / "run", watch=watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen == [44, 45, 46, 47]


def test_a_bad_update_is_left_out_by_the_device(tmp_path: Path) -> None:
    model = Bag()
    numbers = iter(range(100))

    def objective(model: nn.Module, batch: Any) -> Tensor:
        losses = nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")
        return losses * (float("nan") if next(numbers) == 2 else 1.0)

    args = arguments(tmp_path, use_cpu=False, max_steps=5, optim="adamw_torch_fused")
    guard = Guard(lambda: None)
    trainer = MethodTrainer(
        model=model, args=args, method=ERM(), objective=objective, train_dataset=classification_data(),
        callbacks=[guard],
    )  # fmt: skip
    trainer.train()
    assert all(bool(torch.isfinite(value).all()) for value in weights(model).values())
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {4}
