"""``data.json``: hashes of the rows that a run used, so that changed data is detected, and shares of their classes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from deltasam.integrations.storage import write_text
from deltasam.lab.experiments._config import RunConfig
from deltasam.lab.tasks import Data, DataError, DataSource

FILE = "data.json"
LARGEST_CLASS = "largest class"
"""Share of the most frequent class in every split: what a model scores that always answers the same."""
_WORKING_FOLDER = "task.files in"  # relative paths of the user's files start there


def record_rows(config: RunConfig, data: Data, folder: Path) -> None:
    """Writes hashes, shares of classes and the working folder, unless an interrupted run has written them already."""
    if (folder / FILE).is_file():
        return
    shares = {name: _largest_class(rows) for name, rows in data.splits.items()} if data.classes else {}
    relative = any(not Path(file).expanduser().is_absolute() for file in _files(config).values())
    place = {_WORKING_FOLDER: str(Path.cwd())} if relative else {}
    write_text(folder / FILE, json.dumps({**_hashes(data), LARGEST_CLASS: shares, **place}, indent=1))


def absolute_files(config: RunConfig, folder: Path) -> dict[str, str]:
    """Returns the user's files by split, with absolute paths of those that still exist where the run read them."""
    where = Path(str(_read(folder).get(_WORKING_FOLDER, "")))
    there = {split: where / Path(file).expanduser() for split, file in _files(config).items()}
    return {split: str(there[split]) if there[split].is_file() else file for split, file in _files(config).items()}


def changed_split(data: Data, folder: Path) -> str | None:
    """Returns a split whose rows differ from those of the run in this folder, with its origin; else None."""
    known = _read(folder)
    other = [name for name, found in _hashes(data).items() if known.get(name, found) != found]
    return f"{other[0]} ({data.origins.get(other[0], '')})" if other else None


def changed_since(config: RunConfig, folder: Path) -> str | None:
    """Same as :func:`changed_split` for a finished run. Missing data is ignored, and nothing is downloaded."""
    local = config.data is not None or _files(config)
    if not local or not (folder / FILE).is_file():
        return None
    try:
        data = config.task.load(DataSource.find(config.data))
        return changed_split(config.task.stressed(data, config.seed), folder)
    except DataError:
        return None


def _read(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _files(config: RunConfig) -> dict[str, str]:
    return getattr(config.task, "files", None) or {}


def _largest_class(rows: list[dict[str, Any]]) -> float:
    counts = Counter(str(row.get("label")) for row in rows)
    return round(max(counts.values()) / len(rows), 6)


def _hashes(data: Data) -> dict[str, str]:
    return {
        name: hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()[:16]
        for name, rows in data.splits.items()
    }
