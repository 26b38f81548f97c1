"""The Trainer with a method on a GPU: fp16 with its scaler, bf16, clipping, and no waiting for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from deltasam.integrations import MethodTrainer
from deltasam.methods import ERM, SAM, DeltaSAM, LookSAM, Method
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, largest_difference, weights

pytestmark = pytest.mark.gpu


def trained(folder: Path, method: Method | None, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    model = fresh()
    args = arguments(folder, use_cpu=False, **options)
    kind, extra = (hf.Trainer, {}) if method is None else (MethodTrainer, {"method": method})
    trainer = kind(model=model, args=args, train_dataset=classification_data(), **extra)
    trainer.train()
    return trainer, weights(model)


@pytest.mark.parametrize("options", [{}, {"fp16": True}, {"bf16": True}], ids=["float32", "fp16", "bf16"])
def test_without_a_perturbation_it_is_the_plain_trainer(options: dict[str, bool], tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        ours, plain = (trained(tmp_path, method, **options)[1] for method in (SAM(rho=0.0), None))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(ours, plain)


@pytest.mark.parametrize("method", [SAM(rho=0.05), DeltaSAM(rho=0.05), LookSAM(rho=0.05, k=2)], ids=repr)
@pytest.mark.parametrize("options", [{"fp16": True}, {"bf16": True}], ids=["fp16", "bf16"])
def test_half_precision_is_near_float32(method: Method, options: dict[str, bool], tmp_path: Path) -> None:
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 4, "gradient_accumulation_steps": 2}
    trainer, half = trained(tmp_path, method, **options, **settings)
    full = trained(tmp_path, method, **settings)[1]
    moved = largest_difference(full, weights(fresh().cuda()))
    assert largest_difference(half, full) < 0.3 * moved
    assert trainer.method.skipped == 0
    if "fp16" in options:
        assert trainer.accelerator.scaler.get_scale() > 1


def test_a_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    for method in (ERM(), SAM(), DeltaSAM()):
        trainer, _ = trained(tmp_path, method, max_steps=2, bf16=True)
        batch = trainer._prepare_inputs(trainer.data_collator(classification_data()[:4]))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.training_step(trainer.model, dict(batch), None)
        finally:
            torch.cuda.set_sync_debug_mode("default")
