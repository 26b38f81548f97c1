"""The Trainer with a method on a GPU: fp16 with its scaler, bf16, clipping, and no waiting for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from deltasam.integrations import MethodTrainer
from deltasam.methods import ERM, SAM, DeltaSAM, LookSAM, Method
from deltasam.objectives import Classification
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, largest_difference, weights

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
    if options:  # the model's own loss is in half precision there, the objective's never is
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


class Bag(nn.Module):
    """A model that never waits for the device; Hugging Face's look at their masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(41, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.embeddings(input_ids).mean(1))


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
