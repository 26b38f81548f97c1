"""Checks that the texts of a task fit into the positions of a model, and that special tokens leave room for text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.tasks import Task


def check_lengths(task: Task, model: Any, tokenizer: Any, splits: Mapping[str, Sequence[Any]]) -> None:
    """Checks lengths before the training; a text that is too long would fail in the middle of it.

    Args:
        task: The task.
        model: The model.
        tokenizer: Its tokenizer.
        splits: The rows of each split.

    Raises:
        ConfigError: A text has more tokens than the model has positions, or no token of it would be left.
    """
    _check_room(task, tokenizer)
    written = getattr(task, "max_target_length", None)
    if written is None:
        most = positions(model)
    else:
        most, ends = positions(model.get_encoder()), positions(model.get_decoder())
        if ends is not None and written > ends:  # beam search may reach it, whatever the targets are
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


def _check_room(task: Task, tokenizer: Any) -> None:
    """Raises a ConfigError if special tokens leave no room for text."""
    columns = getattr(task, "text", "")
    pairs = isinstance(columns, tuple) and len(columns) == 2 and getattr(task, "pairing", "joint") == "joint"
    for option in ("max_length", "max_target_length", "eval_max_length"):
        limit = getattr(task, option, None)
        together = 2 if pairs and option == "max_length" else 1
        special = tokenizer.num_special_tokens_to_add(pair=together == 2)
        if limit is not None and limit < special + together:
            whose, each = ("a pair of texts", " of each") if together == 2 else ("a text", "")
            raise ConfigError(
                f"task.{option}={limit}: {whose} has {special} special tokens with this model, which leaves no room "
                f"for a word{each}; set task.{option}={special + together} or more"
            )


def positions(model: nn.Module) -> int | None:
    """Returns the number of tokens that the model has positions for; None without a table of positions."""
    sizes = [
        table.num_embeddings - _unused(table)
        for name, table in model.named_modules()
        if isinstance(table, nn.Embedding) and ("position" in name.rpartition(".")[2] or name.endswith("wpe"))
    ]
    return min(sizes, default=None)


def _unused(table: nn.Embedding) -> int:
    """Returns the number of entries before the first position: RoBERTa's padding token, BART's offset."""
    return int(getattr(table, "offset", 0)) + (0 if table.padding_idx is None else table.padding_idx + 1)


def _length(item: Mapping[str, Any]) -> int:
    """Returns the number of tokens of an item, or of the longer of its two views."""
    views = [item] if "input_ids" in item else [view for view in item.values() if isinstance(view, Mapping)]
    return max((len(view["input_ids"]) for view in views), default=0)
