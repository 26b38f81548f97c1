"""``deltasam evaluate``: metrics of a finished run or of any model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from deltasam.lab.cli._arguments import check_positive
from deltasam.lab.cli._errors import InputError, one_line_errors
from deltasam.lab.cli._output import plain_table, silence_libraries, wide_console, without_nan

if TYPE_CHECKING:
    from deltasam.lab.experiments import Loaded

_FILE = re.compile(r"task\.files\.\w+=.")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Computes the metrics of a run's final weights, or of any model, on any split.

    Examples:
      deltasam evaluate runs/mrpc-... --split test
      deltasam evaluate runs/classification-... --split test --set task.files.test=c.csv
      deltasam evaluate --task mirror --model bert-base-uncased --set task.pooling=cls
      deltasam evaluate --task classification --model runs/own-.../model --split test
        --set task.files.train=a.csv task.files.test=c.csv task.text=review task.label=stars
    """

    folder: Positional[Path | None] = None
    """The run folder. Leave it out to evaluate the model of `--model`."""

    task: str | None = None
    """The task, if there is no run folder."""

    model: str | None = None
    """The model, if there is no run folder."""

    set: tuple[str, ...] = ()
    """Settings of the task, such as task.max_length=64. With a run folder, only files: task.files.test=c.csv."""

    split: str | None = None
    """The split. Defaults to the one that the run was evaluated on."""

    rows: int | None = None
    """Size of a fixed random sample to evaluate on. Defaults to all rows."""

    data: Path | None = None
    """Folder with the datasets. Defaults to the one that the run used."""

    batch_size: int = 64
    """Instances per batch. It affects time and memory only."""

    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        """Evaluates the model and prints the metrics."""
        from rich.console import Console
        from rich.text import Text

        from deltasam.step.names import pluralized

        check_positive(rows=self.rows, batch_size=self.batch_size)
        silence_libraries()
        with one_line_errors():
            loaded = self._load()
        rows = f"{pluralized(len(loaded.rows), 'row')} of {loaded.origin}"
        with Console(stderr=True).status(Text(f"Evaluating on {rows}")):
            metrics = self._metrics(loaded)
        if self.json:
            found = {"metrics": metrics, "rows": len(loaded.rows), "origin": loaded.origin}
            print(json.dumps(without_nan(found), indent=2))
            return
        table = plain_table("metric", "value")
        for name, value in metrics.items():
            table.add_row(name, f"{value:.4f}")
        console = wide_console()
        console.print(table)
        console.print(f"\n{rows}", highlight=False)

    def _metrics(self, loaded: Loaded) -> dict[str, float]:
        """Returns the metrics, and what the task measures once after training."""
        task, model, tokenizer, rows = loaded.task, loaded.model, loaded.tokenizer, loaded.rows
        found = task.evaluate(model, tokenizer, rows, batch_size=self.batch_size)
        before = self._before()
        final = task.final(model, tokenizer, loaded.data, rows, before=before, batch_size=self.batch_size)
        return {**found, **final.metrics}

    def _before(self) -> dict[str, float]:
        """Returns the metrics of the run folder, some of which were measured before training."""
        from deltasam.lab.experiments import Result, RunFolder

        return {} if self.folder is None else Result.read(RunFolder(self.folder).result).metrics

    def _load(self) -> Loaded:
        from deltasam.lab.experiments import load, load_run, resolve

        data = None if self.data is None else str(self.data)
        if self.folder is not None:
            given = [f"--{name}" for name in ("task", "model") if getattr(self, name)]
            given += ["--set"] * any(not _FILE.match(setting) for setting in self.set)
            if given:
                raise InputError(
                    f"{self.folder}: {' and '.join(given)} would be ignored, because the run folder defines them; "
                    "give either a run folder or these options"
                )
            files = dict(setting.removeprefix("task.files.").split("=", 1) for setting in self.set)
            return load_run(self.folder, split=self.split, rows=self.rows, data=data, files=files)[1]
        if self.task is None or self.model is None:
            raise InputError("give a run folder, or --task and --model")
        options = {"task": self.task, "model": self.model, "data": data}
        return load(resolve(options=options, settings=self.set), split=self.split, rows=self.rows)
