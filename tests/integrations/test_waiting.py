"""No update synchronizes with the device unless it logs; and the filter of logged losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from deltasam import WeightAverage
from deltasam.integrations import MethodTrainer, WeightAverageCallback
from deltasam.lab.experiments._guard import Guard
from deltasam.methods import ERM
from helpers.trainers import Bag, arguments, classification_data, fresh


class Reads(TorchDispatchMode):
    """Records the updates that read a number from a tensor: on a GPU the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.update, self.found = 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.found.add(self.update)
        return func(*args, **(kwargs or {}))


class Counting(TrainerCallback):
    """Sets the number of the update, from its first pass until after its log entry."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reads.update = state.global_step + 1


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Like Classification, which reads labels on the CPU, where that is free."""
    return nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch"])
def test_updates_read_no_number(optimizer: str, tmp_path: Path) -> None:
    reads = Reads()
    trainer = MethodTrainer(
        model=Bag(),
        args=arguments(tmp_path, logging_strategy="steps", logging_steps=5, max_steps=11, optim=optimizer),
        method=ERM(),  # other methods read the size of the perturbation, on the CPU only
        objective=cross_entropy,
        train_dataset=classification_data(48),
        callbacks=[Counting(reads), Guard(lambda: None), WeightAverageCallback(WeightAverage())],
    )
    with reads:
        trainer.train()
    if optimizer == "adamw_torch":  # the guard has to check every update, and the loops read its number
        assert reads.found >= set(range(1, 12))
    else:
        assert reads.found == {0, 5, 10, 11}  # before the first update, at the entries, at the end


class Scripted:
    """Losses 1, 2, 3, ..., nan in some batches; the number of the batch is its state."""

    def __init__(self, bad: set[int]) -> None:
        self.bad, self.number = bad, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.number += 1
        zeros = 0.0 * model(input_ids=batch["input_ids"]).logits.sum(1)
        return zeros + (math.nan if self.number in self.bad else self.number)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state.get("number", 0)


def logged(folder: Path, bad: set[int], *, resume: bool = False, **options: Any) -> list[float]:
    args = arguments(folder, logging_strategy="steps", **({"logging_steps": 2, "max_steps": 6} | options))
    trainer = MethodTrainer(
        model=fresh(), args=args, method=ERM(), objective=Scripted(bad), train_dataset=classification_data(64)
    )
    wanted = args.logging_nan_inf_filter
    trainer.train(resume_from_checkpoint=resume)
    assert args.logging_nan_inf_filter == wanted  # the arguments may serve another trainer
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_loss_that_is_not_finite_is_logged_as_the_last_finite_one(tmp_path: Path) -> None:
    assert logged(tmp_path, {3, 4}) == [1.5, 2.0, 5.5]
    assert logged(tmp_path, {1}) == [1.0, 3.5, 5.5]  # no finite loss before it
    found = logged(tmp_path, {3}, logging_nan_inf_filter=False)
    assert found[0] == 1.5
    assert all(math.isnan(loss) for loss in found[1:])  # the Trainer's sum stays nan


def test_with_accumulation(tmp_path: Path) -> None:
    # Two batches of the same size in each update, whose losses are (1, 2), (3, 4), ...
    assert logged(tmp_path, set(), gradient_accumulation_steps=2, logging_steps=1, max_steps=3) == [1.5, 3.5, 5.5]
    assert logged(tmp_path, {3}, gradient_accumulation_steps=2, logging_steps=1, max_steps=3) == [1.5, 3.0, 5.5]


def test_a_resumed_training_logs_the_same(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    whole = logged(tmp_path / "whole", {3}, **options)
    assert whole == [1.5, 3.0, 5.5]
    logged(tmp_path / "parts", {3}, **(options | {"max_steps": 2}))
    assert logged(tmp_path / "parts", {3}, resume=True, **options) == whole


def test_operations_are_counted_as_by_the_plain_trainer(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    trainer = MethodTrainer(model=fresh(), args=args, method=ERM(), train_dataset=classification_data())
    batches = [trainer.data_collator(classification_data(n)) for n in (4, 2, 4)]
    plain = [super(type(trainer).__mro__[1], trainer).floating_point_ops(batch) for batch in batches]
    assert [trainer.floating_point_ops(batch) for batch in batches] == plain
    assert plain[0] == 2 * plain[1] > 0
