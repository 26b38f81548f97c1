"""A trained model with its data, for evaluation and analysis."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from deltasam.lab.experiments._adapters import load_adapters
from deltasam.lab.experiments._config import RunConfig
from deltasam.lab.experiments._data_record import absolute_files, check_classes
from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments._folder import RunFolder
from deltasam.lab.experiments._lengths import check_lengths
from deltasam.lab.tasks import Data, DataSource, Task, load_tokenizer
from deltasam.objectives import Objective


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, and the rows of one split.

    Attributes:
        task: The task; its evaluation split is the one that was loaded.
        model: The model in eval mode.
        tokenizer: Its tokenizer.
        rows: The rows of the split.
        origin: Where they came from.
        data: The data of the task, of which this is a split.
    """

    task: Task
    model: Any
    tokenizer: Any
    rows: list[dict[str, Any]]
    origin: str
    data: Data

    @property
    def objective(self) -> Objective:
        """The task's objective, without regularisers."""
        return self.task.objective()

    def batches(self, size: int) -> list[dict[str, Any]]:
        """Returns the rows as batches for the objective."""
        items = self.task.encode(self.rows, self.tokenizer)
        collate = self.task.collator(self.tokenizer)
        return [collate(items[start : start + size]) for start in range(0, len(items), size)]


def load(
    config: RunConfig,
    *,
    path: str | None = None,
    split: str | None = None,
    rows: int | Literal["all"] | None = None,
) -> Loaded:
    """Loads a model and a split.

    Args:
        config: The run: its task and data.
        path: The model; the run's own, untrained, by default.
        split: The split; by default the one that the run evaluates on.
        rows: Size of a fixed random sample, or ``"all"``; by default the rows that the run evaluates on.

    Raises:
        DataError: The data or the model is missing or wrong.
        ConfigError: The texts are longer than the model can read.
    """
    from transformers import set_seed

    limit = None if rows == "all" else rows or config.task.eval_rows
    task = dataclasses.replace(config.task, eval_split=split or config.task.eval_split, eval_rows=limit)
    data = _load_data(config, task)
    whole = path if config.model.lora is None else None  # a run with adapters has saved these alone
    tokenizer = load_tokenizer(whole or config.model.path)
    set_seed(config.seed)
    model = _model(config, task, data, path).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    rows_of_split = data.splits[task.eval_split]
    check_lengths(task, model, tokenizer, {task.eval_split: rows_of_split})
    return Loaded(task, model, tokenizer, rows_of_split, data.origins[task.eval_split], data)


def _model(config: RunConfig, task: Task, data: Data, path: str | None) -> Any:
    """Returns the model, with the adapters of the run if it has trained some."""
    if config.model.lora is None or path is None:
        return task.model(path or config.model.path, data)
    return load_adapters(task.model(config.model.path, data), path)


def _load_data(config: RunConfig, task: Task) -> Data:
    """Loads the requested split. Unnamed classes are inferred from all rows that the run was trained on.

    Training rows are those that the run has seen, with its wrong labels if it was trained on some.
    """
    source = DataSource.find(config.data)
    if task.eval_split == task.train_split:
        data = config.task.stressed(config.task.load(source, (task.train_split,)), config.seed)
        rows = task.sampled(task.eval_split, data.splits[task.eval_split])
        return dataclasses.replace(data, splits={task.eval_split: rows})
    if getattr(task, "kind", None) != "classification" or getattr(task, "classes", ()):
        return task.load(source, (task.eval_split,))
    return task.load(source, (task.train_split, task.eval_split))


def load_run(
    folder: Path,
    *,
    split: str | None = None,
    rows: int | Literal["all"] | None = None,
    data: str | None = None,
    files: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[RunConfig, Loaded]:
    """Loads the final model of a run and a split of its task.

    Args:
        folder: The run folder.
        split: The split; by default the one that the run evaluates on.
        rows: Size of a fixed random sample, or ``"all"``; by default the rows that the run evaluates on.
        data: Folder with the datasets, if it has moved since the run.
        files: Files of splits, in addition to those of the run or replacing them.
        options: Options of the task that replace those of the run, such as ``bits`` and ``evaluate_on``.

    Raises:
        ConfigError: The folder does not hold a finished run with weights.
        DataError: The data is missing or wrong, or has other classes than those trained.
    """
    place = RunFolder(folder)
    if not place.config.is_file():
        inside = min(folder.glob(f"*/{place.config.name}"), default=None)
        remedy = (
            "`deltasam train` creates one" if inside is None else f"name one of those in it, such as {inside.parent}"
        )
        raise ConfigError(f"{folder}: not a run folder (it has no config.yaml); {remedy}")
    config = RunConfig.read(place.config)
    if not place.result.is_file():
        raise ConfigError(
            f"{folder}: the run is not finished; resume: `deltasam train --config {place.config} --output {folder}`"
        )
    if not place.model.is_dir():
        raise ConfigError(
            f"{folder}: the run has kept no weights; repeat it by `deltasam train`, or in a sweep with keep: weights"
        )
    if data is not None:
        config = dataclasses.replace(config, data=data)
    if files and not hasattr(config.task, "files"):
        raise ConfigError(f"the task {config.task.name} does not take files")
    unknown = [name for name in options or () if not hasattr(config.task, name)]
    if unknown:
        raise ConfigError(f"the task {config.task.name} has no option {unknown[0]}")
    found = {**absolute_files(config, folder), **(files or {})}
    changes: Any = {**(options or {}), **({"files": found} if found else {})}
    try:
        there = dataclasses.replace(config, task=dataclasses.replace(config.task, **changes))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    loaded = load(there, path=str(place.model), split=split, rows=rows)
    check_classes(loaded.data, folder)
    return config, loaded
