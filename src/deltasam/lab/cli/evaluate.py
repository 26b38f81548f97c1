"""``deltasam evaluate``: metrics of a finished run or of any model, as trained and under other conditions."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from deltasam.lab.cli._arguments import check_positive
from deltasam.lab.cli._conditions import AS_TRAINED, by_bits, by_condition
from deltasam.lab.cli._errors import InputError, one_line_errors
from deltasam.lab.cli._output import plain_table, silence_libraries, wide_console, without_nan
from deltasam.lab.cli._torchao import torchao_metrics

if TYPE_CHECKING:
    from rich.table import Table

    from deltasam.lab.experiments import Loaded
    from deltasam.lab.tasks import Measured

_SETTING = re.compile(r"\w+(\.\w+)+=")
_FILE = re.compile(r"task\.files\.\w+=.")
_QUALITY = ("nll", "brier", "ece")
_INTERVAL = ("ece_low", "ece_high")
_TITLES = {"nll": "NLL", "brier": "Brier", "ece": "ECE"}


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Computes the metrics of a run's final weights, or of any model, on any split.

    Classifiers get a row for each condition: as trained, after temperature scaling, with weights rounded to few bits,
    and on other sets. NLL, Brier and ECE are log loss, Brier score and expected calibration error.

    Examples:
      deltasam evaluate runs/mrpc-... --on qqp --bits 4 3 --figures pictures
      deltasam evaluate runs/classification-... --split test task.files.test=c.csv
      deltasam evaluate --task mirror --model bert-base-uncased task.pooling=cls
      deltasam evaluate --task classification --model runs/own-.../model --split test
        task.files.train=a.csv task.files.test=c.csv task.text=review task.label=stars
    """

    folder: Positional[Path | None] = None
    """The run folder. Leave it out to evaluate the model of `--model`."""

    settings: Positional[tuple[str, ...]] = ()
    """Settings of the task, such as task.max_length=64. With a run folder, only files: task.files.test=c.csv."""

    task: str | None = None
    """The task, if there is no run folder."""

    model: str | None = None
    """The model, if there is no run folder."""

    set: tuple[str, ...] = ()
    """The same as the settings above."""

    split: str | None = None
    """The split. Defaults to the one that the run was evaluated on."""

    rows: int | None = None
    """Size of a fixed random sample to evaluate on. Defaults to all rows, also if the run was evaluated on fewer."""

    bits: tuple[int, ...] | None = None
    """Round the weights to these numbers of bits; nothing after it for none. Defaults to those of the task, 8 4 3."""

    on: tuple[str, ...] | None = None
    """Other sets: tasks (qqp, mnli:validation_mismatched), or files with the same columns. Defaults to the task's."""

    torchao: bool = False
    """Also quantize the weights with torchao, to int8 and int4. Needs the extra torchao."""

    figures: Path | None = None
    """Folder for a reliability diagram and a curve of the metric against the bits."""

    data: Path | None = None
    """Folder with the datasets. Defaults to the one that the run used."""

    batch_size: int = 64
    """Instances per batch. It affects time and memory only."""

    json: bool = False
    """Print JSON instead of a table."""

    @staticmethod
    def setting_hint(name: str) -> str:
        """Returns "did you mean section.option?" for a name that is not an option, or an empty string."""
        from deltasam.lab.experiments import option_hint

        return option_hint(name, {})

    def run(self) -> None:
        """Evaluates the model, prints the metrics and draws the figures."""
        from rich.console import Console
        from rich.text import Text

        from deltasam.step.names import pluralized

        check_positive(rows=self.rows, batch_size=self.batch_size)
        silence_libraries()
        with one_line_errors():
            loaded, before = self._load(), self._before()
        rows = f"{pluralized(len(loaded.rows), 'row')} of {loaded.origin}"
        with Console(stderr=True).status(Text(f"Evaluating on {rows}")):
            found = self._measure(loaded, before)
        if self.json:
            plain = {"metrics": found.metrics, "rows": len(loaded.rows), "origin": loaded.origin}
            print(json.dumps(without_nan({**plain, "reliability": found.reliability}), indent=2))
        else:
            console = wide_console()
            for table in _tables(found.metrics, loaded.task.metrics):
                console.print(table)
                console.print()
            console.print(rows, highlight=False)
        if self.figures is not None:
            self._draw(self.figures, found, loaded.task.primary)

    def _measure(self, loaded: Loaded, before: dict[str, float]) -> Measured:
        """Returns the metrics, and what the task measures once after training; some of it was measured before."""
        from deltasam.lab.tasks import Measured, tokenizing_once

        task, model, tokenizer, rows = loaded.task, loaded.model, loaded.tokenizer, loaded.rows
        with tokenizing_once():
            found = Measured(task.evaluate(model, tokenizer, rows, batch_size=self.batch_size))
            found |= task.final(model, tokenizer, loaded.data, rows, before=before, batch_size=self.batch_size)
            return found | Measured(torchao_metrics(loaded, self.batch_size)) if self.torchao else found

    def _draw(self, folder: Path, found: Measured, primary: str) -> None:
        from deltasam.analysis import plot_bits, plot_reliability

        ax = None
        for name, bins in found.reliability.items():
            title = {"evaluation": AS_TRAINED, "scaled": "temperature-scaled"}.get(name, name.replace("on_", "on ", 1))
            ax = plot_reliability(bins, ax, label=title)
        curves = None
        for name, values in by_bits(found.metrics, primary).items():
            curves = plot_bits(values, curves, label=name, metric=primary)
        drawn = {"reliability.svg": ax, "bits.svg": curves}
        if ax is None and curves is None:
            print("no figures: this task has neither classes nor metrics with rounded weights", file=sys.stderr)
        for name, axes in drawn.items():
            if axes is not None:
                folder.mkdir(parents=True, exist_ok=True)
                axes.figure.savefig(folder / name)
                print(f"Figure: {folder / name}", file=sys.stderr)

    @property
    def _folder(self) -> Path | None:
        """The run folder. The first setting is in its place if there is none."""
        return None if self.folder is None or _SETTING.match(str(self.folder)) else self.folder

    @property
    def _settings(self) -> list[str]:
        first = [str(self.folder)] if self._folder is None and self.folder is not None else []
        wrong = [word for word in self.settings if not _SETTING.match(word)]
        if wrong:
            raise InputError(f"{wrong[0]}: give one run folder; settings look like task.files.test=c.csv")
        return [*self.set, *first, *self.settings]

    def _before(self) -> dict[str, float]:
        """Returns the metrics of the run folder, some of which were measured before training."""
        from deltasam.lab.experiments import Result, RunFolder

        return {} if self._folder is None else Result.read(RunFolder(self._folder).result).metrics

    def _load(self) -> Loaded:
        from deltasam.lab.experiments import load, load_run, resolve

        data = None if self.data is None else str(self.data)
        options: dict[str, Any] = {"bits": self.bits, "evaluate_on": self.on}
        options = {name: value for name, value in options.items() if value is not None}
        if self._folder is not None:
            given = [f"--{name}" for name in ("task", "model") if getattr(self, name)]
            given += [setting for setting in self._settings if not _FILE.match(setting)]
            if given:
                raise InputError(
                    f"{self._folder}: {' and '.join(given)} would be ignored, because the run folder defines them; "
                    "give either a run folder or these options"
                )
            files = dict(setting.removeprefix("task.files.").split("=", 1) for setting in self._settings)
            return load_run(
                self._folder, split=self.split, rows=self.rows or "all", data=data, files=files, options=options
            )[1]
        if self.task is None or self.model is None:
            raise InputError("give a run folder, or --task and --model")
        named = {"task": self.task, "model": self.model, "data": data}
        settings = [*self._settings, *(f"task.{name}={json.dumps(value)}" for name, value in options.items())]
        return load(resolve(options=named, settings=settings), split=self.split, rows=self.rows)


def _tables(metrics: Mapping[str, float], own: Sequence[str]) -> list[Table]:
    """Returns a table with a row for each condition, if there are several, and one with the other metrics."""
    conditions = by_condition(metrics)
    if len(conditions) == 1:
        return [_list(metrics)]
    measured = {name for found in conditions.values() for name in found}
    columns = [name for name in (*(name for name in own if name not in _QUALITY), *_QUALITY) if name in measured]
    intervals = "ece_low" in measured
    table = plain_table("condition", *(_TITLES.get(name, name) for name in columns), *["95% interval"] * intervals)
    for column in table.columns[1:]:
        column.justify = "right"
    for condition, found in conditions.items():
        cells = [f"{found[name]:.4f}" if name in found else "" for name in columns]
        if "ece_low" in found:
            cells.append(f"[{found['ece_low']:.4f}, {found['ece_high']:.4f}]")
        table.add_row(condition, *cells)
    rest = {name: value for name, value in conditions[AS_TRAINED].items() if name not in (*columns, *_INTERVAL)}
    return [table, _list(rest)] if rest else [table]


def _list(metrics: Mapping[str, float]) -> Table:
    table = plain_table("metric", "value")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    return table
