"""``data.json``: hashes of the rows that a run used, so that changed data is detected, and their classes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deltasam.integrations.storage import write_text
from deltasam.lab.experiments._config import RunConfig
from deltasam.lab.tasks import Data, DataError, DataSource

FILE = "data.json"
LARGEST_CLASS = "largest class"
"""Share of the most frequent class in every split: what a model scores that always answers the same."""
_CLASSES = "classes"
_WORKING_FOLDER = "task.files in"  # relative paths of the user's files start there


def record_rows(config: RunConfig, data: Data, folder: Path) -> None:
    """Writes hashes, classes, their shares and the working folder, unless an interrupted run has already done so."""
    if (folder / FILE).is_file():
        return
    shares = {name: _largest_class(rows) for name, rows in data.splits.items()} if data.classes else {}
    relative = any(not Path(file).expanduser().is_absolute() for file in _files(config).values())
    place = {_WORKING_FOLDER: str(Path.cwd())} if relative else {}
    found = {**_hashes(data), _CLASSES: data.classes, LARGEST_CLASS: shares, **place}
    write_text(folder / FILE, json.dumps(found, indent=1))


def check_classes(data: Data, folder: Path) -> None:
    """Raises a DataError if the rows have other classes than the run was trained with.

    Classes that nobody has named are inferred from the training rows, which may have changed since.
    """
    known = _read(folder).get(_CLASSES)
    if known is not None and tuple(known) != data.classes:
        raise DataError(
            f"the classes of the data are {', '.join(data.classes)}, but the model of {folder} was trained with "
            f"{', '.join(known)}: its training rows have changed; restore them, or train again with --output"
        )


def absolute_files(config: RunConfig, folder: Path) -> dict[str, str]:
    """Returns the user's files by split, with absolute paths of those that still exist where the run read them."""
    where = Path(str(_read(folder).get(_WORKING_FOLDER, "")))
    there = {split: where / Path(file).expanduser() for split, file in _files(config).items()}
    return {split: str(there[split]) if there[split].is_file() else file for split, file in _files(config).items()}


def changed_split(data: Data, folder: Path) -> str | None:
    """Returns a split whose rows differ from those of the run in this folder, with its origin; else None."""
    other = _other(_hashes(data), folder)
    return None if other is None else f"{other} ({data.origins.get(other, '')})"


def changed_since(config: RunConfig, folder: Path) -> str | None:
    """Same as :func:`changed_split` for a finished run. Missing data is ignored, and nothing is downloaded."""
    return changed_runs([(config, folder)]).get(folder)


def changed_runs(runs: Iterable[tuple[RunConfig, Path]]) -> dict[Path, str]:
    """Returns the folders of finished runs whose rows have changed since, each with the split and its origin.

    Rows are read once for all runs that share them. Missing data is ignored, and nothing is downloaded.
    """
    read: dict[tuple[str, str | None], tuple[Data, dict[str, str]] | None] = {}
    found = {}
    for config, folder in runs:
        local = config.data is not None or _files(config)
        if not local or not ((folder / FILE).is_file() and (folder / "result.json").is_file()):
            continue
        key = (repr(config.task), config.data)
        if key not in read:
            read[key] = _present(config)
        if (present := read[key]) is None:
            continue
        data, hashes = present
        own = config.task.stressed(data, config.seed)  # the rows that it leaves as they are keep their hash
        now = {name: hashes[name] if rows is data.splits[name] else _hash(rows) for name, rows in own.splits.items()}
        other = _other(now, folder)
        if other is not None:
            found[folder] = f"{other} ({data.origins.get(other, '')})"
    return found


def _present(config: RunConfig) -> tuple[Data, dict[str, str]] | None:
    try:
        data = config.task.load(DataSource.find(config.data))
    except DataError:
        return None
    return data, _hashes(data)


def _other(hashes: Mapping[str, str], folder: Path) -> str | None:
    """Returns a split whose hash is not the recorded one."""
    known = _read(folder)
    return next((name for name, found in hashes.items() if known.get(name, found) != found), None)


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
    return {name: _hash(rows) for name, rows in data.splits.items()}


def _hash(rows: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()[:16]
