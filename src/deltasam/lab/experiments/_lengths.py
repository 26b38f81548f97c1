"""Checks that the texts of a task fit into the positions of a model, and that special tokens leave room for text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.tasks import Task


def check_lengths(task: Task, model: Any, tokenizer: Any, splits: Mapping[str, Sequence[Any]]) -> None:
    """Raises a ConfigError if a text has more tokens than the model has positions, or if no token of it is left."""
    _check_room(task, tokenizer)
    written = getattr(task, "max_target_length", None)
    most = positions(model if written is None else model.get_encoder())
    if written is not None:
        ends = positions(model.get_decoder())
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
            raise ConfigError(
                f"task.{option}={limit}: the {special} special tokens of this model leave no room for text; set "
                f"task.{option}={special + together} or more"
            )


def positions(model: nn.Module) -> int | None:
    """Returns the number of tokens that the model has positions for; None without a table of positions."""
    sizes = []
    for name, table in model.named_modules():
        if isinstance(table, nn.Embedding) and ("position" in name.rpartition(".")[2] or name.endswith("wpe")):
            padding = 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa starts after its padding
            sizes.append(table.num_embeddings - int(getattr(table, "offset", 0)) - padding)  # BART has an offset
    return min(sizes, default=None)


def _length(item: Mapping[str, Any]) -> int:
    """Returns the number of tokens of an item, or of the longer of its two views."""
    views = [item] if "input_ids" in item else [view for view in item.values() if isinstance(view, Mapping)]
    return max((len(view["input_ids"]) for view in views), default=0)
