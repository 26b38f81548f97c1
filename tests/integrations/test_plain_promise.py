"""What MethodTrainer's docstring promises about training without a perturbation, and each of its exceptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from deltasam.integrations import MethodTrainer
from deltasam.methods import ERM, SAM, Method
from helpers.tiny import causal, encoder_config, sentences
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, largest_difference, weights

Make = Callable[[], Any]
ROUNDING = 1e-6


def token_data(n: int = 20) -> list[dict[str, Tensor]]:
    """Sequences whose first token is not a target, so every version of transformers counts the same targets."""
    batch = sentences(n)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, 0] = -100
    return [{**{name: value[i] for name, value in batch.items()}, "labels": labels[i]} for i in range(n)]


TOKENS: dict[str, Make] = {
    "llama": lambda: causal("llama", attention_dropout=0.1),
    "gpt2": lambda: causal("gpt2"),
    "masked": lambda: hf.BertForMaskedLM(encoder_config("bert")),
    "token classes": lambda: hf.BertForTokenClassification(encoder_config("bert", num_labels=41)),
}


def difference(make: Make, data: Any, folder: Path, method: Method, **options: Any) -> tuple[Any, Any]:
    """Returns the weights after a few updates of SGD, which shows the gradients: plain, and with the method."""
    ends = []
    for given in (None, method):
        torch.manual_seed(1)
        model = make()
        common: dict[str, Any] = {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1, "max_steps": 3}
        args = arguments(folder, **(common | options))
        if given is None:
            hf.Trainer(model=model, args=args, train_dataset=data).train()
        else:
            MethodTrainer(model=model, args=args, train_dataset=data, method=given).train()
        ends.append(weights(model))
    torch.manual_seed(1)
    assert largest_difference(ends[0], weights(make())) > 1e-3, "nothing was trained"
    return ends[0], ends[1]


@pytest.mark.parametrize("method", [ERM(), SAM(rho=0.0)], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("size", [3, 4])
def test_one_label_per_instance_is_bit_for_bit(size: int, method: Method, tmp_path: Path) -> None:
    options = {"per_device_train_batch_size": size, "max_grad_norm": 0.5}
    assert_same_bits(*difference(fresh, classification_data(), tmp_path, method, **options))


@pytest.mark.parametrize("name", list(TOKENS))
def test_tokens_are_bit_for_bit_in_batches_of_a_power_of_two(name: str, tmp_path: Path) -> None:
    assert_same_bits(*difference(TOKENS[name], token_data(), tmp_path, SAM(rho=0.0)))


@pytest.mark.parametrize("name", list(TOKENS))
@pytest.mark.parametrize(
    "options", [{"per_device_train_batch_size": 5}, {"label_smoothing_factor": 0.1}], ids=lambda o: next(iter(o))
)
def test_other_batches_and_smoothing_are_rounding(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert largest_difference(*difference(TOKENS[name], token_data(), tmp_path, ERM(), **options)) < ROUNDING


def test_smoothed_classes_are_rounding(tmp_path: Path) -> None:
    options = {"label_smoothing_factor": 0.1}
    assert largest_difference(*difference(fresh, classification_data(), tmp_path, ERM(), **options)) < ROUNDING


def test_accumulation_is_rounding_where_trainer_counts_the_targets(tmp_path: Path) -> None:
    """Llama uses the number of targets; for other heads see test_accumulation_is_the_large_batch."""
    plain, ours = difference(TOKENS["llama"], token_data(), tmp_path, ERM(), gradient_accumulation_steps=3)
    assert largest_difference(plain, ours) < ROUNDING
