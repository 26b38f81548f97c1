"""``deltasam train``: one run from a preset, a file or options."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError, one_line_errors
from deltasam.lab.cli._output import (
    print_note,
    progress_bar,
    results_table,
    silence_libraries,
    warn_if_not_learned,
    wide_console,
)

if TYPE_CHECKING:
    from deltasam.lab.experiments import RunConfig


@dataclass(frozen=True, kw_only=True)
class Train:
    """Trains and evaluates one run. A finished run is not repeated, an interrupted one continues.

    A run is described by a preset or a file, then by options, then by settings such as
    `method.rho=0.02 batch.size=16`. Later values override earlier ones. `--dry-run` prints all settings. A learning
    rate that is not set is chosen by the size of the model.

    Examples:
      deltasam train --task docstrings --model minilm-l6 --method delta-sam
      deltasam train --preset glue/bert-base/mrpc/delta-sam seed=3
      deltasam train --task classification --model bert-base-cased task.files.train=a.csv task.files.validation=b.csv
        task.text=review task.label=stars
      deltasam train --task sst2-prompt --model smollm2-135m --method per-instance-sam model.lora.r=16 method.rho=0.02
        method.params=base
      deltasam train --config runs/.../config.yaml
    """

    settings: Positional[tuple[str, ...]] = ()
    """Settings of the run as section.option=value. Values are YAML."""

    preset: str | None = None
    """Name of a preset, see `deltasam list presets`."""

    config: Path | None = None
    """YAML file with settings, such as config.yaml of another run."""

    task: str | None = None
    """Name of the task, see `deltasam list tasks`."""

    model: str | None = None
    """The model: a folder, a name on the hub, or minilm-l6 or smollm2-135m (included in packages, no download)."""

    method: str | None = None
    """Name of the method, see `deltasam list methods`. Defaults to ERM."""

    seed: int | None = None
    """Random seed. Defaults to the preset's, or 42."""

    data: Path | None = None
    """Folder with <dataset>/<split>.jsonl.gz. Defaults to the variable DELTASAM_DATA, then to the hub."""

    output: Path | None = None
    """The run folder. Defaults to runs/<task>-<model>-<method>-s<seed>-<id>."""

    keep: Literal["results", "weights", "checkpoints"] = "weights"
    """What to keep of the finished run: results only, the final weights too, or also the checkpoints."""

    tensorboard: bool = False
    """Also write TensorBoard logs into the run folder."""

    dry_run: bool = False
    """Print all settings of the run as YAML without training."""

    @staticmethod
    def setting_hint(name: str) -> str:
        """Returns "did you mean section.option?" for a name that is not an option, or an empty string."""
        from deltasam.lab.experiments import option_hint

        return option_hint(name, {})

    def run(self) -> None:
        """Trains, or prints the settings."""
        if self.tensorboard and not any(map(find_spec, ("tensorboard", "tensorboardX"))):
            raise InputError("--tensorboard needs TensorBoard: pip install 'deltasam[tensorboard]'")
        with one_line_errors():
            config = self.resolve()
            if self.dry_run:
                print(config.to_yaml(), end="")
                return
            self._train(config)

    def resolve(self) -> RunConfig:
        """Returns the run that the options describe."""
        from deltasam.lab.experiments import resolve

        options = {"task": self.task, "model": self.model, "seed": self.seed}
        options["data"] = str(self.data.resolve()) if self.data is not None else None
        return resolve(
            preset=self.preset,
            file=self.config,
            method=self.method,
            options=options,
            settings=self.settings,
            note=print_note,
        )

    def _train(self, config: RunConfig) -> None:
        from deltasam.lab.experiments import RunFolder, run

        folder = self.output or Path("runs") / config.run_name
        known = RunFolder(folder).finished(config) is not None
        keeps_weights = self.keep != "results"
        silence_libraries()
        if int(os.environ.get("RANK", "0")):  # under torchrun only the first process prints
            run(config, folder, tensorboard=self.tensorboard, keep_weights=keeps_weights)
            return
        with progress_bar(config.run_name.rpartition("-")[0]) as watch:
            result = run(
                config, folder, watch=watch, tensorboard=self.tensorboard, keep_weights=self.keep != "results"
            )
        console = wide_console()
        if known:
            note = f"This run was finished already; nothing was done. To repeat it, remove {folder}."
            console.print(note, style="dim", highlight=False)
        else:
            RunFolder(folder).keep_only(self.keep)
        console.print(results_table([result]))
        console.print(f"\nRun folder: {folder}", highlight=False)
        warn_if_not_learned([folder], console)
