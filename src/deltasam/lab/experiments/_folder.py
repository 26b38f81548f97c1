"""The folder of a run: its files, which run it belongs to, and the checkpoint to resume from."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deltasam.integrations.storage import PARTIAL, StorageError, sealed, write_text
from deltasam.lab.experiments._config import RunConfig
from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments._result import Result

COMPLETE = "complete.json"
"""Marks a complete checkpoint, see :func:`~deltasam.integrations.storage.seal`."""
Keep = Literal["results", "weights", "checkpoints"]
"""What is kept of a finished run: the results only, the final weights too, or also the checkpoints."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """Paths inside the folder of a run.

    ========================  =====================================================================================
    ``config.yaml``           the resolved configuration; ``deltasam train --config`` repeats the run
    ``environment.json``      versions, commit, device
    ``data.json``             a hash of the rows of every split, to detect changed data, the share of its largest
                              class, and the folder that relative paths of the user's files start from
    ``metrics.jsonl``         one line per log entry: step, epoch, loss, sharpness, evaluation metrics, ...
    ``result.json``           :class:`~deltasam.lab.experiments.Result`; written last, so it marks a finished run
    ``model/``                final weights and tokenizer, for ``from_pretrained``
    ``checkpoints/``          the last two, to resume from; the commands remove them when the run is finished
    ``tensorboard/``          event files, if requested
    ``.lock``                 locked while a process makes the run; removed when it is finished
    ========================  =====================================================================================
    """

    path: Path

    @property
    def config(self) -> Path:
        """The configuration."""
        return self.path / "config.yaml"

    @property
    def result(self) -> Path:
        """The result."""
        return self.path / "result.json"

    @property
    def metrics(self) -> Path:
        """The log entries."""
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        """The final weights."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints."""
        return self.path / "checkpoints"

    def finished(self, config: RunConfig) -> Result | None:
        """Returns the result if this folder holds this run and it is finished, else None. Writes nothing.

        Raises:
            ConfigError: The folder holds another run, or other files.
        """
        file = next((path for path in (self.path, *self.path.parents) if path.is_file()), None)
        if file is not None:
            raise ConfigError(f"{file} is a file; choose a folder by --output")
        if self.config.is_file():
            owner = RunConfig.read(self.config)
            if owner.run_id != config.run_id:
                raise ConfigError(
                    f"{self.path} holds another run ({owner.run_name}), which stays as it is; choose another "
                    "folder by --output, or remove that one"
                )
            return Result.read(self.result) if self.result.is_file() else None
        # A run killed while it wrote its first file leaves a partial file; another process may be writing it now.
        if self.path.is_dir() and any(PARTIAL not in path.name for path in self.path.iterdir()):
            raise ConfigError(f"{self.path} is not empty and holds no run; choose another folder by --output")
        return None

    def claim(self, config: RunConfig) -> None:
        """Creates the folder and writes the configuration."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.config, config.to_yaml())

    def keep_only(self, what: Keep) -> None:
        """Removes what is not to be kept of the finished run. Its checkpoints are larger than its weights."""
        if what != "checkpoints":
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        if what == "results":
            shutil.rmtree(self.model, ignore_errors=True)

    def last_checkpoint(self, before: int) -> Path | None:
        """Returns the last complete, unaltered checkpoint before the update ``before``; None if there is none.

        Incomplete checkpoints of a killed run are removed; altered ones are kept and skipped with a warning.
        """
        found: dict[int, Path] = {}
        for path in self.checkpoints.glob("checkpoint-*") if self.checkpoints.is_dir() else ():
            number = path.name.rpartition("-")[2]
            if not number.isdigit() or not path.is_dir():
                continue
            step = int(number)
            if not (path / COMPLETE).is_file():
                # The run was killed while writing it. Another process may be removing it as well.
                shutil.rmtree(path, ignore_errors=True)
            elif step < before:
                found[step] = path
        for step in sorted(found, reverse=True):
            try:
                sealed(found[step], COMPLETE)
            except StorageError as error:  # noqa: PERF203 - there are two at most
                is_first = step == min(found)
                next_try = "the run starts from the beginning" if is_first else "the checkpoint before it is used"
                _log.warning("%s; %s", error, next_try)
            else:
                return found[step]
        return None
