"""What rows a run was made of: kept in its folder, so that others are not taken for them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from deltasam.experiments._config import RunConfig
from deltasam.storage import write_text
from deltasam.tasks import Data, DataError, DataSource

FILE = "data.json"


def keep(data: Data, folder: Path) -> None:
    """Notes the rows of a run that begins; those of one that goes on are noted already."""
    if not (folder / FILE).is_file():
        write_text(folder / FILE, json.dumps(_fingerprints(data), indent=1))


def changed(data: Data, folder: Path) -> str | None:
    """Which split has other rows than the run in this folder had, in words; None if all is as it was, or not known."""
    try:
        known = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    other = [name for name, found in _fingerprints(data).items() if known.get(name, found) != found]
    return f"{other[0]} ({data.origins.get(other[0], '')})" if other else None


def changed_since(config: RunConfig, folder: Path) -> str | None:
    """As :func:`changed`, for a finished run, whose data may be gone; rows on the hub are not loaded for that."""
    local = config.data is not None or getattr(config.task, "files", None)
    if not local or not (folder / FILE).is_file():
        return None
    try:
        return changed(config.task.load(DataSource.find(config.data)), folder)
    except DataError:
        return None


def _fingerprints(data: Data) -> dict[str, str]:
    return {
        name: hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()[:16]
        for name, rows in data.splits.items()
    }
