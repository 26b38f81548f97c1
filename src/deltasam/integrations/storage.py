"""Atomic file writes, and folders sealed with checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial-"
"""Marks the names of unfinished files, also those of killed processes."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class StorageError(Exception):
    """A folder cannot be written to, or a file is not what was written."""


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically: a temporary file is synced to disk and renamed.

    A reader of ``path`` finds the old or the new content, also after a crash. If writing fails, the old content
    remains and the temporary file is removed.
    """
    # Not the process id: two machines with a shared file system may have the same one.
    partial = path.with_name(f"{path.name}{PARTIAL}{secrets.token_hex(6)}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)  # noqa: PTH105 - Path.replace returns an unused path
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes text atomically, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def remove_partial(folder: Path) -> None:
    """Removes unfinished files of killed processes; no process may be writing to the folder."""
    for path in folder.glob(f"*{PARTIAL}*"):
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Syncs a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some file systems cannot sync folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def seal(folder: Path, name: str, notes: dict[str, object]) -> None:
    """Marks a folder as complete: writes the file ``name`` last, with notes and the checksums of all files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != name)
    for path in files:
        sync(path)
    sums = {path.relative_to(folder).as_posix(): checksum(path) for path in files}
    write_text(folder / name, json.dumps({"notes": notes, "sha256": sums}, indent=1))


def sealed(folder: Path, name: str) -> dict[str, object]:
    """Checks every file of a folder that :func:`seal` marked and returns its notes.

    Raises:
        StorageError: The mark is missing or unreadable, or a file is missing, truncated or altered.
    """
    mark = folder / name
    try:
        found = json.loads(mark.read_text(encoding="utf-8"))
        notes, sums = dict(found["notes"]), dict(found["sha256"])
    except FileNotFoundError:
        raise StorageError(f"{folder}: incomplete, {name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{mark}: truncated or altered ({error})") from error
    for relative, expected in sums.items():
        path = folder / str(relative)
        if not path.is_file():
            raise StorageError(f"{path}: missing")
        if checksum(path) != expected:
            raise StorageError(f"{path}: truncated or altered since it was written (the checksum differs)")
    return notes


@contextmanager
def explain_storage_errors(folder: Path) -> Iterator[None]:
    """Converts the errors of a full disk or a read-only folder, from any library, into a :class:`StorageError`."""
    try:
        yield
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise StorageError(
            f"{folder}: {reason}. Complete files are intact; start the run again to continue from its last complete "
            "checkpoint"
        ) from error


def _reason(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"the disk is full or the quota is used up ({error.strerror}); free some space or choose another folder"
    if isinstance(error, OSError) and error.errno in _FORBIDDEN:
        return f"cannot be written to ({error.strerror}); check its permissions or choose another folder"
    text = str(error)
    writers = ("PytorchStreamWriter", "unexpected pos", "No space left", "File too large", "Disk quota")
    if any(writer in text for writer in writers):  # torch and safetensors do not raise an OSError
        return f"a file could not be written completely ({text.splitlines()[0][:120]}); the disk may be full"
    return None
