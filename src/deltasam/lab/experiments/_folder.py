"""The folder of a run: what is in it, whose it is, and from where an interrupted run goes on."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltasam.integrations.storage import PARTIAL, StorageError, remove_partial, seal, sealed, write_text
from deltasam.lab.experiments._config import RunConfig
from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments._result import Result

_COMPLETE = "complete.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """Paths inside the folder of a run.

    ========================  =====================================================================================
    ``config.yaml``           the run as it was resolved; ``deltasam train --config`` repeats it
    ``environment.json``      versions, commit, device
    ``data.json``             a hash of the rows of every split, so that others are not taken for them, and the folder
                              that relative paths of the user's own files start from
    ``metrics.jsonl``         one line per log entry: step, epoch, loss, sharpness, evaluation metrics, ...
    ``result.json``           :class:`~deltasam.lab.experiments.Result`; written last, so its presence means "finished"
    ``model/``                final weights and tokenizer, for ``from_pretrained``
    ``checkpoints/``          the last two, to go on from
    ``tensorboard/``          event files, if asked for
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
        """The result, if this folder holds this very run and it is finished. Nothing is written.

        Raises:
            ConfigError: The folder holds another run, or something that is no run.
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
        # A run killed while it wrote its very first file leaves only that; another process may be writing it now.
        if self.path.is_dir() and any(PARTIAL not in path.name for path in self.path.iterdir()):
            raise ConfigError(f"{self.path} is not empty and holds no run; choose another folder by --output")
        return None

    def claim(self, config: RunConfig) -> None:
        """Makes the folder this run's."""
        self.path.mkdir(parents=True, exist_ok=True)
        write(self.config, config.to_yaml())

    def tidy(self) -> None:
        """Removes what kills have left of files that were being written; for the end of the run."""
        remove_partial(self.path)

    def last_checkpoint(self, before: int) -> Path | None:
        """The last checkpoint of fewer than ``before`` updates that is complete and as it was written.

        One that a kill cut short is removed; one that was altered since is left alone, told of, and passed over.
        """
        found: dict[int, Path] = {}
        for path in self.checkpoints.glob("checkpoint-*") if self.checkpoints.is_dir() else ():
            number = path.name.rpartition("-")[2]
            if not number.isdigit() or not path.is_dir():
                continue
            step = int(number)
            if not (path / _COMPLETE).is_file():
                # The run was killed while writing it. Another process may be removing it, too.
                shutil.rmtree(path, ignore_errors=True)
            elif step < before:
                found[step] = path
        for step in sorted(found, reverse=True):
            if _is_intact(found[step], last=step == min(found)):
                return found[step]
        return None


def _is_intact(checkpoint: Path, *, last: bool) -> bool:
    try:
        sealed(checkpoint, _COMPLETE)
    except StorageError as error:
        none = "there is no other, so the run starts from the beginning"
        _log.warning("%s; %s", error, none if last else "the checkpoint before it is used")
        return False
    return True


def mark_complete(checkpoint: Path, notes: dict[str, Any]) -> None:
    """Says that all of a checkpoint has been written, with its checksums and what the run needs to go on."""
    seal(checkpoint, _COMPLETE, notes)


def notes_of(checkpoint: Path) -> dict[str, Any]:
    """What :func:`mark_complete` noted."""
    return sealed(checkpoint, _COMPLETE)


def write(path: Path, text: str) -> None:
    """Writes a file so that it is there in full or not at all."""
    write_text(path, text)
