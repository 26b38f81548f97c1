"""Whether a model can read texts as long as the task hands them over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from deltasam.experiments._errors import ConfigError
from deltasam.tasks import Task


def check_lengths(task: Task, model: Any, tokenizer: Any, splits: Mapping[str, Sequence[Any]]) -> None:
    """A text that is too long would fail in the middle of the training, or in the evaluation after it.

    Args:
        task: The task.
        model: The model.
        tokenizer: Its tokenizer.
        splits: The rows to be read.

    Raises:
        ConfigError: A text is longer than what the model has positions for.
    """
    written = getattr(task, "max_target_length", None)
    if written is None:
        most = positions(model)
    else:
        most, ends = positions(model.get_encoder()), positions(model.get_decoder())
        if ends is not None and written > ends:  # by the beam search, whatever the targets are
            raise ConfigError(
                f"task.max_target_length={written}: the model's positions end at {ends}; "
                f"set task.max_target_length={ends}"
            )
    if most is None or task.max_length <= most:
        return
    for split, rows in splits.items():
        padded = getattr(task, "pad_to_max_length", False)
        longest = task.max_length if padded else max(map(_length, task.encode(rows, tokenizer)))
        if longest > most:
            raise ConfigError(
                f"task.max_length={task.max_length}: {split} has texts of {longest} tokens, and the model's positions "
                f"end at {most}; set task.max_length={most}"
            )


def positions(model: nn.Module) -> int | None:
    """How many tokens the model has positions for; None where it takes them from no table."""
    sizes = [
        table.num_embeddings - _unused(table)
        for name, table in model.named_modules()
        if isinstance(table, nn.Embedding) and ("position" in name.rpartition(".")[2] or name.endswith("wpe"))
    ]
    return min(sizes, default=None)


def _unused(table: nn.Embedding) -> int:
    """Entries before that of the first token: RoBERTa counts from behind its padding token, BART from an offset."""
    return int(getattr(table, "offset", 0)) + (0 if table.padding_idx is None else table.padding_idx + 1)


def _length(item: Mapping[str, Any]) -> int:
    """Tokens of an item, or of the longer one of its two views."""
    views = [item] if "input_ids" in item else [view for view in item.values() if isinstance(view, Mapping)]
    return max((len(view["input_ids"]) for view in views), default=0)
