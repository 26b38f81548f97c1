"""Files that are made or downloaded once and kept in the user's cache folder."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from deltasam.lab.tasks._data import DataError

CACHE_VARIABLE = "DELTASAM_CACHE"


def cache_folder() -> Path:
    """Returns the folder of the variable ``DELTASAM_CACHE``, or ``deltasam`` in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser().resolve()
    if sys.platform == "darwin":
        base = Path("~/Library/Caches")
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", "~/AppData/Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return base.expanduser() / "deltasam"


def made_once(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Returns the folder of a model, after ``make(partial_folder)`` has written it if it does not exist.

    Other processes wait for it. A folder that was written incompletely is never used.

    Args:
        folder: A folder inside that of :func:`cache_folder`.
        name: Name of the model in messages.
        make: Creates the folder that it is given and writes the files of the model to it.

    Raises:
        DataError: The cache folder is not writable.
    """
    if folder.is_dir():
        return folder
    from filelock import FileLock

    partial = folder.with_name(f"{folder.name}.partial-{secrets.token_hex(6)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():  # else another process has made it while this one was waiting
                try:
                    make(partial)
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"model {name!r}: {folder} could not be written ({error.strerror or error}); set {CACHE_VARIABLE} to a "
            "folder with 1 GB of free space"
        ) from error
    return folder
