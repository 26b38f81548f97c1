"""Sets of other domains: rows of another task in the form of this one, and its classes from this one's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltasam.lab.tasks._data import DataError, OtherSet
from deltasam.lab.tasks._files import ENDINGS, read_rows
from deltasam.lab.tasks._known import find_task
from deltasam.lab.tasks._source import DataSource


def other_logits(other: OtherSet, logits: Tensor, classes: Sequence[str]) -> Tensor:
    """Returns logits of the other set's classes from those of the trained ones, whose probabilities are added up."""
    groups = torch.tensor(class_groups(classes, other.classes))
    log_p = logits.log_softmax(-1)
    return torch.stack([log_p[:, groups == number].logsumexp(-1) for number in range(len(other.classes))], 1)


def read_other(task: Any, name: str, source: DataSource, classes: tuple[str, ...]) -> OtherSet:
    """Returns the rows of another task (``qqp``, ``mnli:validation_mismatched``) or of a file with the same columns.

    Args:
        task: The task that is trained.
        name: The other task, or the file.
        source: The source of the datasets.
        classes: The trained classes. A file has labels of these, perhaps not all of them; a task has its own classes.

    Raises:
        DataError: There is no such task or file, or its texts or classes do not fit.
    """
    if name.endswith(ENDINGS):
        rows = read_rows(Path(name).expanduser())
        if not rows:
            raise DataError(f"{name}: the file is empty")
        return OtherSet(task.check_other(rows, classes, name), name, classes)
    other, split = _task(name)
    if other.kind != task.kind or len(other.text) != len(task.text):
        raise DataError(
            f"task.evaluate_on={name}: a task of {other.kind} of {len(other.text)} texts, and {task.name} is one of "
            f"{task.kind} of {len(task.text)}"
        )
    data = other.load(source, (split,))
    columns = dict(zip(other.text, task.text, strict=True))
    rows = [{columns.get(key, key): value for key, value in row.items()} for row in data.splits[split]]
    return OtherSet(rows, data.origins[split], data.classes)


def class_groups(classes: Sequence[str], others: Sequence[str]) -> list[int]:
    """Returns for each class the number of the other class that it counts as.

    Classes of the same names are the same. Where there are two others and one of them has a name of ours, the rest
    counts as the second: neutral and contradiction are not_entailment. Of two classes each, those that start with
    "not_" are the same, if there is one on both sides. Otherwise equally many classes are the same in their order.

    Example:
        >>> class_groups(["entailment", "neutral", "contradiction"], ["entailment", "not_entailment"])
        [0, 1, 1]
        >>> class_groups(["not_equivalent", "equivalent"], ["not_duplicate", "duplicate"])
        [0, 1]
        >>> class_groups(["not_equivalent", "equivalent"], ["entailment", "not_entailment"])
        [1, 0]
    """
    if set(classes) == set(others):
        return [others.index(name) for name in classes]
    shared = [name for name in others if name in classes]
    if len(others) == 2 and len(shared) == 1:
        same = others.index(shared[0])
        return [same if name == shared[0] else 1 - same for name in classes]
    negative, other_negative = ([name.startswith("not_") for name in names] for names in (classes, others))
    if len(classes) == len(others) == 2 and sum(negative) == sum(other_negative) == 1:
        return [other_negative.index(one) for one in negative]
    if len(classes) == len(others):
        return list(range(len(classes)))
    raise DataError(f"task.evaluate_on: the classes {list(others)} do not fit {list(classes)}")


def _task(name: str) -> tuple[Any, str]:
    """Returns a task of sentences and the split of it that is meant."""
    called, _, split = name.partition(":")
    try:
        found: Any = find_task(called)
    except ValueError as error:
        raise DataError(f"task.evaluate_on={name}: {error}, or a file ({', '.join(ENDINGS)})") from error
    if not (hasattr(found, "text") and hasattr(found, "kind")):
        raise DataError(f"task.evaluate_on={name}: not a task of sentences")
    return found, split or found.eval_split
