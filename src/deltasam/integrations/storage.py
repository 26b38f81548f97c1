"""Atomic writes, and folders sealed with checksums, so that truncated or altered files are detected."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial-"
"""Part of the names of files that are being written, or were when a process was killed."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class StorageError(Exception):
    """A folder is not writable, or a file was truncated or altered."""


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically: to a temporary file, which is synced to disk and then renamed.

    A reader of ``path`` finds the old content or the new one, also after a crash. If writing fails, the old content
    stays and the temporary file is removed.
    """
    # Not the process id: it may be the same on two machines that share a file system.
    partial = path.with_name(f"{path.name}{PARTIAL}{secrets.token_hex(6)}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)  # noqa: PTH105 - tests replace os.replace
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes text atomically, see :func:`write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def remove_partial(folder: Path) -> None:
    """Removes partial files of killed processes; no other process may be writing in the folder."""
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


def seal(folder: Path, name: str, notes: Mapping[str, object]) -> None:
    """Marks a folder as complete by the file ``name``, written last, with checksums of all files and ``notes``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != name)
    for path in files:
        sync(path)
    sums = {path.relative_to(folder).as_posix(): checksum(path) for path in files}
    write_text(folder / name, json.dumps({"notes": dict(notes), "sha256": sums}, indent=1))


def sealed(folder: Path, name: str) -> dict[str, object]:
    """Checks every file of a folder marked by :func:`seal` and returns the notes.

    Raises:
        StorageError: The mark is missing or unreadable, or a file is missing, truncated or altered.
    """
    mark = folder / name
    try:
        found = json.loads(mark.read_text(encoding="utf-8"))
        notes, sums = dict(found["notes"]), dict(found["sha256"])
    except FileNotFoundError:
        raise StorageError(f"{folder}: incomplete") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{mark}: truncated or altered ({error})") from error
    for relative, expected in sums.items():
        path = folder / str(relative)
        if not path.is_file():
            raise StorageError(f"{path}: missing")
        if checksum(path) != expected:
            raise StorageError(f"{path}: truncated or altered (its checksum has changed)")
    return notes


@contextmanager
def explain_storage_errors(folder: Path) -> Iterator[None]:
    """Converts errors of a full disk or a read-only folder, from any library, to a :class:`StorageError`."""
    try:
        yield
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise StorageError(
            f"{folder}: {reason}. Complete files are unharmed; start the run again to resume from its last complete "
            "checkpoint"
        ) from error


def _reason(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in _FULL:
        return (
            f"the disk is full or the quota is exceeded ({error.strerror}); free some space, or choose another folder"
        )
    if isinstance(error, OSError) and error.errno in _FORBIDDEN:
        return f"not writable ({error.strerror}); check its permissions, or choose another folder"
    text = str(error)
    writers = ("PytorchStreamWriter", "unexpected pos", "No space left", "File too large", "Disk quota")
    if any(sign in text for sign in writers):  # torch and safetensors do not raise an OSError
        return f"a file could not be written completely ({text.splitlines()[0][:120]}); the disk may be full"
    return None
