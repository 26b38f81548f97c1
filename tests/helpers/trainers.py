"""Small data sets, models and arguments for tests of the trainers; a run takes a fraction of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from helpers.tiny import classifier, sentences, seq2seq, target_tokens


def classification_data(n: int = 24, *, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random sentences; the label is whether the first token is even."""
    batch = sentences(n, seed=seed)
    labels = batch["input_ids"][:, 0] % 2
    return [{**{key: value[i] for key, value in batch.items()}, "labels": labels[i]} for i in range(n)]


def seq2seq_data(n: int = 16) -> list[dict[str, Tensor]]:
    """Random pairs of sequences of very different lengths, padded."""
    batch, labels = sentences(n), target_tokens(n)
    labels[::2, 2:] = -100
    return [{**{key: value[i] for key, value in batch.items()}, "labels": labels[i]} for i in range(n)]


class Bag(nn.Module):
    """A model that never synchronizes; Hugging Face's read their masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(41, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.embeddings(input_ids).mean(1))


def fresh(kind: str = "bert", *, seed: int = 1, **options: Any) -> hf.PreTrainedModel:
    """A tiny classifier, T5 or BART, with the same weights every time."""
    torch.manual_seed(seed)
    make = seq2seq if kind in ("t5", "bart") else classifier
    return make(kind, **options)


def arguments(folder: Path, **options: Any) -> hf.TrainingArguments:
    """Training arguments without reports, progress bars and checkpoints by default."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_steps": 6,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    kind = options.pop("kind", hf.TrainingArguments)
    return kind(output_dir=str(folder), **(defaults | options))


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Asserts that all tensors are equal, bit for bit."""
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"{len(different)} of {len(first)} tensors differ, e.g. {different[0]}"


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest absolute difference of any entry."""
    return max(float((first[name] - second[name]).abs().max()) for name in first)
