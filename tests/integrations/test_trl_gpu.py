"""TRL's trainers with a method on a GPU: captured equals eager, and TRL's metrics are written by replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs a newer transformers than the oldest one")
pytest.importorskip("peft")

from datasets import Dataset
from trl import DPOConfig, SFTConfig

from deltasam import ERM, SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.integrations import DPOMethodTrainer, SFTMethodTrainer
from helpers.preferences import lora, preferences, tokenizer
from helpers.trainers import arguments, largest_difference, weights

pytestmark = pytest.mark.gpu

METHODS = [ERM(), SAM(rho=0.05), DeltaSAM(rho=0.05), PerInstanceSAM(rho=0.05), PerInstanceSAM(rho=0.05, params="base")]


def trained(kind: Any, folder: Path, method: Method, *, capture: bool, **options: Any) -> Any:
    """Every batch has the same shape, so that the third step is a replay."""
    configuration = SFTConfig if kind is SFTMethodTrainer else DPOConfig
    texts = preferences(48)
    if kind is SFTMethodTrainer:
        texts = Dataset.from_list([{"prompt": row["prompt"], "completion": row["chosen"]} for row in texts])
    defaults: dict[str, Any] = {
        "kind": configuration, "use_cpu": False, "bf16": False, "gradient_checkpointing": False, "optim": "sgd",
        "learning_rate": 0.1, "logging_strategy": "steps", "logging_steps": 2, "pad_to_multiple_of": 32,
        "max_steps": 8,
    }  # fmt: skip
    args = arguments(folder, **(defaults | options))
    model = lora()
    trainer = kind(model=model, args=args, method=method, train_dataset=texts, processing_class=tokenizer(),
                   capture=capture)  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", [SFTMethodTrainer, DPOMethodTrainer])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{type(method).__name__}, {method.params}")
def test_captured_equals_eager(kind: Any, method: Method, tmp_path: Path) -> None:
    captured, eager = (trained(kind, tmp_path, method.replace(state={}), capture=capture) for capture in (True, False))
    report = captured.captured.report
    assert report.obstacles == {}
    assert (report.recorded, report.replayed) == (1, 7)
    before = weights(lora().cuda())
    ours, theirs = ({name: p for name, p in weights(each.model).items() if "default" in name}
                    for each in (captured, eager))  # fmt: skip
    moved = largest_difference(theirs, {name: before[name] for name in theirs})
    assert largest_difference(ours, theirs) < 1e-3 * moved
    logs = [[entry for entry in each.state.log_history if "loss" in entry] for each in (captured, eager)]
    ignored = ("epoch", "learning_rate", "rewards/accuracies")  # rewards of 0 up to rounding at the first step
    for own, other in zip(*logs, strict=True):
        assert own.keys() == other.keys()
        assert {"entropy", "mean_token_accuracy", "num_tokens"} <= own.keys()
        for name in own.keys() - set(ignored):
            assert own[name] == pytest.approx(other[name], rel=1e-2, abs=1e-4), name


@pytest.mark.parametrize("method", [SAM(rho=0.05), PerInstanceSAM(rho=0.05)], ids=lambda method: type(method).__name__)
def test_captured_packs_equal_eager(method: Method, tmp_path: Path) -> None:
    options = {"packing": True, "max_length": 32, "per_device_train_batch_size": 1}
    captured, eager = (
        trained(SFTMethodTrainer, tmp_path, method.replace(state={}), capture=capture, **options)
        for capture in (True, False)
    )
    assert captured.captured.report.obstacles == {}
    ours, theirs = ({name: p for name, p in weights(each.model).items() if "default" in name}
                    for each in (captured, eager))  # fmt: skip
    assert largest_difference(ours, theirs) < 1e-4


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kind", [SFTMethodTrainer, DPOMethodTrainer])
def test_the_metrics_do_not_wait_for_the_device(kind: Any, tmp_path: Path) -> None:
    trainer = trained(kind, tmp_path, SAM(rho=0.05), capture=True, max_steps=3)
    (batch,), count = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    replayed = trainer.captured.report.replayed
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.training_step(trainer.model, batch, count)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.captured.report.replayed == replayed + 1
