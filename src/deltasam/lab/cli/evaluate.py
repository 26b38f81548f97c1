"""``deltasam evaluate``: metrics of a finished run, or of any model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError
from deltasam.lab.cli._runs import bad_input, check_positive, strict, wide_console

if TYPE_CHECKING:
    from deltasam.lab.experiments import Loaded

_FILE = re.compile(r"task\.files\.\w+=.")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """The metrics of a run's final weights, on the split it was evaluated on or on another one.

    Examples:
      deltasam evaluate runs/mrpc-... --split test
      deltasam evaluate runs/classification-... --split test --set task.files.test=c.csv
      deltasam evaluate --task mirror --model bert-base-uncased --set task.pooling=cls
      deltasam evaluate --task classification --model runs/own-.../model --split test
        --set task.files.train=a.csv task.files.test=c.csv task.text=review task.label=stars
    """

    folder: Positional[Path | None] = None
    """The run folder; leave it out to evaluate a model as it is."""

    task: str | None = None
    """The task, without a run folder."""

    model: str | None = None
    """The model, without a run folder."""

    set: tuple[str, ...] = ()
    """Settings of the task, such as task.max_length=64; with a run folder only files: task.files.test=c.csv."""

    split: str | None = None
    """The split; by default the one the run evaluates on."""

    rows: int | None = None
    """Evaluate on a fixed random sample of so many rows."""

    data: Path | None = None
    """Folder with the datasets, if it is not where the run had it."""

    batch_size: int = 64
    """Instances per batch; it changes nothing but time and memory."""

    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        """Evaluates and prints."""
        from rich.console import Console
        from rich.text import Text

        from deltasam.lab.cli._progress import quiet
        from deltasam.step.names import counted

        check_positive(rows=self.rows, batch_size=self.batch_size)
        quiet()
        with bad_input():
            loaded = self._load()
        rows = f"{counted(len(loaded.rows), 'row')} of {loaded.origin}"
        with Console(stderr=True).status(Text(f"Evaluating on {rows}")):
            metrics = loaded.task.evaluate(loaded.model, loaded.tokenizer, loaded.rows, batch_size=self.batch_size)
        if self.json:
            found = {"metrics": metrics, "rows": len(loaded.rows), "origin": loaded.origin}
            print(json.dumps(strict(found), indent=2))
            return
        from rich.table import Table

        table = Table("metric", "value", box=None, pad_edge=False, header_style="bold")
        for name, value in metrics.items():
            table.add_row(name, f"{value:.4f}")
        console = wide_console()
        console.print(table)
        console.print(f"\n{rows}", highlight=False)

    def _load(self) -> Loaded:
        from deltasam.lab.experiments import load, load_run, resolve

        data = None if self.data is None else str(self.data)
        if self.folder is not None:
            given = [f"--{name}" for name in ("task", "model") if getattr(self, name)]
            given += ["--set"] * any(not _FILE.match(setting) for setting in self.set)
            if given:
                raise InputError(
                    f"{self.folder}: {' and '.join(given)} would be ignored, a run folder has its own; leave out the "
                    "one or the other"
                )
            files = dict(setting.removeprefix("task.files.").split("=", 1) for setting in self.set)
            return load_run(self.folder, split=self.split, rows=self.rows, data=data, files=files)[1]
        if self.task is None or self.model is None:
            raise InputError("name a run folder, or a model by --task and --model")
        options = {"task": self.task, "model": self.model, "data": data}
        return load(resolve(options=options, settings=self.set), split=self.split, rows=self.rows)
