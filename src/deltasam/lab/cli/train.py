"""``deltasam train``: one run, from a preset, a file, or options."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError
from deltasam.lab.cli._runs import bad_input, results_table, wide_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltasam.lab.experiments import RunConfig

_SETTINGS = "settings of the run are written as section.option=value, such as method.rho=0.02 schedule.epochs=1"


@dataclass(frozen=True, kw_only=True)
class Train:
    """Trains and evaluates one run and writes its folder. A finished run is not repeated, an interrupted one goes on.

    A run is described by a preset or a file, then by options, then by settings such as
    `method.rho=0.02 batch.size=16`; what comes later wins. `--show` prints all settings there are.

    Examples:
      deltasam train --task docstrings --model minilm-l6 --method delta-sam
      deltasam train --preset glue/bert-base/mrpc/delta-sam seed=3
      deltasam train --task classification --model bert-base-cased task.files.train=a.csv task.files.validation=b.csv
        task.text=review task.label=stars
      deltasam train --config runs/.../config.yaml
    """

    settings: Positional[tuple[str, ...]] = ()
    """Any settings of the run, as section.option=value; values are YAML."""

    preset: str | None = None
    """A setup by name; `deltasam list presets` has them all."""

    config: Path | None = None
    """A YAML file, such as config.yaml of another run."""

    task: str | None = None
    """What to learn; `deltasam list tasks` has them all."""

    model: str | None = None
    """A folder, a name on the hub, or minilm-l6 (in a package, no download)."""

    method: str | None = None
    """How to take the gradient, ERM by default; `deltasam list methods` has them all."""

    seed: int | None = None
    """Seed of everything that is drawn; 42 by default, or the preset's."""

    data: Path | None = None
    """Folder with <dataset>/<split>.jsonl.gz; otherwise the variable DELTASAM_DATA, otherwise the hub."""

    output: Path | None = None
    """The run folder; by default runs/<task>-<model>-<method>-s<seed>-<id>."""

    tensorboard: bool = False
    """Write TensorBoard's files into the run folder, too."""

    show: bool = False
    """Print the run as resolved, in YAML, and stop."""

    @classmethod
    def arranged(cls, words: Sequence[str]) -> list[str]:
        """The words with the settings last, where tyro finds them; users write them where they think of them.

        Raises:
            InputError: An option is unknown; tyro would count the settings after it among the unknown ones.
        """
        known = [field.name for field in fields(cls) if field.name != "settings"]
        for name in (word[2:].partition("=")[0] for word in words if word.startswith("--")):
            if name not in (*known, "help") and not name.startswith("tyro-"):
                raise InputError(f"--{name}: unknown option; {_way_out(name, known)}")
        flags = {f"--{field.name}" for field in fields(cls) if field.type == "bool"}
        settings: list[str] = []
        others: list[str] = []
        for before, word in zip(["", *words], words, strict=False):
            is_value = before.startswith("--") and "=" not in before and before not in flags
            setting = "=" in word and not word.startswith("-") and not is_value
            (settings if setting else others).append(word)
        return [*others, *settings]

    def run(self) -> None:
        """Trains, or shows what would be trained."""
        with bad_input():
            config = self.resolve()
            if self.show:
                print(config.to_yaml(), end="")
                return
            self._train(config)

    def resolve(self) -> RunConfig:
        """The run that the options describe."""
        from deltasam.lab.experiments import resolve

        options = {"task": self.task, "model": self.model, "seed": self.seed}
        options["data"] = str(self.data.resolve()) if self.data is not None else None
        return resolve(
            preset=self.preset, file=self.config, method=self.method, options=options, settings=self.settings
        )

    def _train(self, config: RunConfig) -> None:
        from deltasam.lab.cli._progress import bar, quiet
        from deltasam.lab.experiments import RunFolder, run

        folder = self.output or Path("runs") / config.run_name
        known = RunFolder(folder).finished(config) is not None
        quiet()
        if int(os.environ.get("RANK", "0")):  # under torchrun the first process speaks for all
            run(config, folder, tensorboard=self.tensorboard)
            return
        with bar(config.run_name.rpartition("-")[0]) as watch:
            result = run(config, folder, watch=watch, tensorboard=self.tensorboard)
        console = wide_console()
        if known:
            told = f"This run is finished already; nothing was done. To repeat it remove {folder}."
            console.print(told, style="dim", highlight=False)
        console.print(results_table([result]))
        console.print(f"\nRun folder: {folder}", highlight=False)


def _way_out(name: str, known: Sequence[str]) -> str:
    """The option that may have been meant, or the setting, or how settings are written."""
    from deltasam.lab.experiments import option_hint

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if close:
        return f"did you mean --{close[0]}?"
    setting = option_hint(name, {}).rstrip("?")
    return f"{setting}=... (without --)?" if setting else f"{_SETTINGS}; --show prints them all"
