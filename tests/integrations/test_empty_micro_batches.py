"""A micro-batch may have no target token if its optimizer step has some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from deltasam.integrations import MethodTrainer
from deltasam.methods import ERM, SAM, DeltaSAM, Method
from deltasam.objectives import Seq2Seq
from helpers.trainers import arguments, fresh, largest_difference, seq2seq_data, weights


class InOrder(MethodTrainer):
    """Uses the rows in order, in every version of transformers."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def data(ignored: range) -> list[dict[str, Tensor]]:
    """Eight pairs of sequences, some without targets."""
    rows = seq2seq_data(8)
    for row in ignored:
        rows[row]["labels"] = torch.full_like(rows[row]["labels"], -100)
    return rows


def moved(folder: Path, method: Method, ignored: range, size: int, **options: Any) -> dict[str, Tensor]:
    """Returns the change of the weights by one optimizer step over the eight, for a micro-batch size."""
    model = fresh("t5", dropout_rate=0.0).double()
    before = weights(model)
    args = arguments(
        folder,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=8 // size,
        optim="sgd",
        learning_rate=1.0,
        max_grad_norm=0.0,
        max_steps=1,
    )
    InOrder(model=model, args=args, method=method, train_dataset=data(ignored), **options).train()
    return {name: before[name] - value for name, value in weights(model).items()}


@pytest.mark.parametrize("ignored", [range(4, 8), range(4)], ids=["the last", "the first"])
@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_a_micro_batch_may_be_without_targets(ignored: range, reduction: Any, tmp_path: Path) -> None:
    options = {"objective": Seq2Seq(reduction=reduction)}
    whole, parts = (moved(tmp_path, ERM(), ignored, size, **options) for size in (8, 4))
    assert max(float(value.abs().max()) for value in whole.values()) > 1e-2
    assert largest_difference(whole, parts) < 1e-10


@pytest.mark.parametrize("method", [SAM(rho=0.05), DeltaSAM(rho=0.05)], ids=["SAM", "DeltaSAM"])
def test_it_adds_nothing_to_a_perturbed_step(method: Method, tmp_path: Path) -> None:
    step = moved(tmp_path, method, range(4, 8), 4)
    assert all(bool(value.isfinite().all()) for value in step.values())
    assert max(float(value.abs().max()) for value in step.values()) > 1e-2


def test_parts_of_a_micro_batch_may_be_without_targets(tmp_path: Path) -> None:
    """A micro-batch that is split because memory ran out is still part of its optimizer step."""

    class InHalves(InOrder):
        def training_step(self, *args: Any) -> Tensor:
            self.splitting.largest = 2
            return super().training_step(*args)

    model = fresh("t5")
    args = arguments(tmp_path, gradient_accumulation_steps=2, max_steps=1)
    trainer = InHalves(model=model, args=args, method=ERM(), train_dataset=data(range(4, 8)), on_out_of_memory="split")
    trainer.train()
    assert trainer.splitting.largest == 2


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("size", [8, 4])
def test_an_optimizer_step_may_not(reduction: Any, size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="target token"):
        moved(tmp_path, ERM(), range(8), size, objective=Seq2Seq(reduction=reduction))
