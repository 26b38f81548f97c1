"""What rows a run was made of: kept in its folder, so that others are not taken for them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from deltasam.integrations.storage import write_text
from deltasam.lab.experiments._config import RunConfig
from deltasam.lab.tasks import Data, DataError, DataSource

FILE = "data.json"
_WHERE = "task.files in"  # the working folder, which relative paths of the user's own files start from


def keep(config: RunConfig, data: Data, folder: Path) -> None:
    """Notes the rows of a run that begins, and where its files are; those of one that goes on are noted already."""
    if (folder / FILE).is_file():
        return
    relative = any(not Path(file).expanduser().is_absolute() for file in _files(config).values())
    place = {_WHERE: str(Path.cwd())} if relative else {}
    write_text(folder / FILE, json.dumps({**_fingerprints(data), **place}, indent=1))


def from_anywhere(config: RunConfig, folder: Path) -> RunConfig:
    """The run in this folder with whole paths of its own files, as far as they are where they were."""
    where = _noted(folder).get(_WHERE)
    files = _files(config)
    if not isinstance(where, str) or not files:
        return config
    there = {split: Path(where) / Path(file).expanduser() for split, file in files.items()}
    found = {split: str(there[split]) if there[split].is_file() else file for split, file in files.items()}
    changes: Any = {"files": found}
    return dataclasses.replace(config, task=dataclasses.replace(config.task, **changes))


def changed(data: Data, folder: Path) -> str | None:
    """Which split has other rows than the run in this folder had, in words; None if all is as it was, or not known."""
    known = _noted(folder)
    other = [name for name, found in _fingerprints(data).items() if known.get(name, found) != found]
    return f"{other[0]} ({data.origins.get(other[0], '')})" if other else None


def changed_since(config: RunConfig, folder: Path) -> str | None:
    """As :func:`changed`, for a finished run, whose data may be gone; rows on the hub are not loaded for that."""
    local = config.data is not None or _files(config)
    if not local or not (folder / FILE).is_file():
        return None
    try:
        return changed(config.task.load(DataSource.find(config.data)), folder)
    except DataError:
        return None


def _noted(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _files(config: RunConfig) -> dict[str, str]:
    return getattr(config.task, "files", None) or {}


def _fingerprints(data: Data) -> dict[str, str]:
    return {
        name: hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()[:16]
        for name, rows in data.splits.items()
    }
